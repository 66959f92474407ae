"""A replacement gets the results of collectives that the other ranks have called, and an error if it calls others."""

import pytest
import torch

from relight.training.collectives.shared_results import SharedResult, came_to_another, came_to_fewer, give, outputs_of


def test_the_results_of_operations_that_give_all_ranks_the_same_are_found() -> None:
    one, two = torch.zeros(2), torch.ones(3)
    assert outputs_of("allreduce", ([one, two],)) == [one, two]
    assert outputs_of("allgather", ([[one, two]], [torch.zeros(2)])) == [one, two]
    assert outputs_of("_allgather_base", (two, torch.zeros(1))) == [two]
    assert outputs_of("barrier", ()) == []


@pytest.mark.parametrize("operation", ["reduce", "scatter", "gather", "alltoall", "reduce_scatter", "send", "recv"])
def test_other_operations_have_none_to_give(operation: str) -> None:
    assert outputs_of(operation, ([torch.zeros(2)],)) is None


def test_outputs_get_the_result_and_inputs_are_left() -> None:
    outputs, own = [torch.zeros(2), torch.zeros(2)], torch.full((2,), 7.0)
    result = SharedResult("allgather", [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    give(result, "allgather", ([outputs], [own]))
    assert torch.equal(torch.stack(outputs), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert torch.equal(own, torch.full((2,), 7.0))


@pytest.mark.parametrize(
    ("operation", "tensor"),
    [("broadcast", torch.zeros(2)), ("allreduce", torch.zeros(3)), ("allreduce", torch.zeros(2, dtype=torch.int64))],
)
def test_another_collective_is_told(operation: str, tensor: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="must depend on nothing but the state"):
        give(SharedResult("allreduce", [torch.ones(2)]), operation, ([tensor],))
    assert not tensor.any()


def test_more_and_fewer_collectives_are_told() -> None:
    assert "calls broadcast in a replacement, where the other ranks have called no further" in str(
        came_to_another("broadcast")
    )
    assert "no further collective in a replacement" in str(came_to_fewer([SharedResult("barrier", [])]))
