"""Settings of torch that an interrupted step left behind."""

from collections.abc import Callable, Iterator

import pytest
import torch

from relight.training.state.torch_settings import TorchSettings, adopt_settings, shared_settings

CHANGES: dict[str, Callable[[], object]] = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
}


def values() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    settings = TorchSettings()
    settings.begin()
    yield
    settings.roll_back()


@pytest.mark.parametrize("name", CHANGES)
def test_they_are_put_back(name: str) -> None:
    before, settings = values(), TorchSettings()
    settings.begin()
    CHANGES[name]()
    assert values() != before
    settings.roll_back()
    assert values() == before


def test_a_replacement_takes_over_those_of_all_threads() -> None:
    before, own = values(), shared_settings()
    for name in ("dtype", "precision", "deterministic"):
        CHANGES[name]()
    changed, theirs = values(), shared_settings()
    adopt_settings(own)
    assert values() == before
    adopt_settings(theirs)
    assert values() == changed
