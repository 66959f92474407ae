"""A step as a transaction: what is undone, what is learnt, and where the barrier may stand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from relight.core.worker.pattern import Learner
from relight.training.data import rng
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.tensors import WRITING
from relight.training.transaction.image_plan import LEARNING_STEPS
from relight.training.transaction.transaction import Transaction
from relight.transfer.io.codec import decode_tree, encode_tree

Body = Callable[["Script"], None]


class Net(nn.Module):
    kept: Any  # what a test gives it

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.norm(self.first(x)).relu()
        self.seen.append(float(hidden.detach().mean()))
        self.seen = self.seen[-3:]
        return self.last(hidden) * self.scale  # type: ignore[no-any-return]


class Script:
    """Steps by hand, as the loop takes them; `body` is the block. Nothing is shared with other ranks."""

    def __init__(self, body: Body, optimizers: int = 1) -> None:
        torch.manual_seed(1)
        self.net, self.shadow = Net(), nn.Linear(4, 2).requires_grad_(False)
        kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD]
        self.optimizers = [kind(self.net.parameters(), lr=0.01) for kind in kinds[:optimizers]]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2)
        self.launches = self.launches_of_all = 0
        self.body = body
        self.state = TrackedState(
            {"net": self.net, "shadow": self.shadow},
            {str(number): optimizer for number, optimizer in enumerate(self.optimizers)},
            {"scheduler": self.scheduler},
            {},
        )
        self.transaction = Transaction(self.state, self)
        self.early = False  # the barrier of this step was passed
        self.barriers: list[str] = []  # in front of which write, or "end"
        self.number = 0
        self.transaction.install()

    def watch_with(self, transaction: Transaction) -> None:
        """Another transaction from here on."""
        self.transaction.remove()
        self.transaction = transaction
        transaction.install()

    def attempt(self) -> None:
        """A step up to its end or its barrier at the end of the block."""
        torch.manual_seed(self.number)
        self.early = False
        self.transaction.begin()
        self.body(self)
        if not self.early:
            self.transaction.prepare(early=False)

    def commit(self) -> None:
        if not self.early:
            self.barriers.append("end")
        self.transaction.count(self.transaction.number, 1)
        self.transaction.commit()
        self.number += 1

    def step(self) -> None:
        self.attempt()
        self.commit()

    def undo(self) -> None:
        self.transaction.roll_back()
        self.state.gradients.clear()

    def write(self, number: int = 0) -> None:
        """`optimizer.step()`, with what relight does in front of it."""
        if not self.early and self.transaction.before_write(str(number), str(number)):
            self.transaction.prepare(early=True)
            self.early = True
            self.barriers.append(str(number))
        self.optimizers[number].step()
        self.optimizers[number].zero_grad()

    def collective(self, *, of_all: bool = True) -> None:
        self.launches += 1
        self.launches_of_all += of_all

    def train(self) -> None:
        self.net(torch.randn(6, 4)).square().mean().backward()
        self.collective()

    def bits(self) -> bytes:
        """All that a script could see."""
        flags = [(m.training, list(vars(m).get("seen", ())), vars(m).get("calls")) for m in self.net.modules()]
        return encode_tree(
            {
                "state": [p.detach() for p in self.net.parameters()] + [p.detach() for p in self.shadow.parameters()],
                "buffers": dict(self.net.named_buffers()),
                "order": [name for name, _ in self.net.named_buffers()],
                "optimizers": [copy.deepcopy(o.state_dict()) for o in self.optimizers],
                "scheduler": self.scheduler.state_dict(),
                "flags": flags,
                "trains": [p.requires_grad for p in self.net.parameters()],
            },
            "bits",
        )


def plain(script: Script) -> None:
    script.train()
    script.write()


def two_writes(script: Script) -> None:
    script.train()
    script.write(0)
    script.train()
    script.write(1)


def late_collective(script: Script) -> None:
    script.train()
    script.write()
    script.collective()


def through_data(script: Script) -> None:
    for parameter in script.shadow.parameters():
        parameter.data.mul_(0.5).add_(0.1)
    plain(script)


def assigned_data(script: Script) -> None:
    for parameter in script.shadow.parameters():
        parameter.data = parameter.data * 0.5 + 0.1
    plain(script)


def decays_first(script: Script) -> None:
    with torch.no_grad():
        for parameter in script.net.parameters():
            parameter.mul_(0.9)
    plain(script)


def assigns_a_buffer(script: Script) -> None:
    scale = script.net.scale
    assert isinstance(scale, torch.Tensor)
    script.net.scale = 0.9 * scale + 0.1 * script.number
    plain(script)


def assigns_the_first_buffer(script: Script) -> None:
    """As spectral_norm does: the same tensor again, with other values."""
    mean = script.net.norm.running_mean
    assert mean is not None
    script.net.norm.running_mean = torch.mul(mean, 0.9, out=mean)
    plain(script)


def deletes_a_buffer(script: Script) -> None:
    mean = script.net.norm.running_mean
    del script.net.norm.running_mean
    script.net.norm.register_buffer("running_mean", mean)
    plain(script)


def sets_rates(script: Script) -> None:
    for group in script.optimizers[0].param_groups:
        group["lr"] *= 0.9
    plain(script)


def by_hand(script: Script) -> None:
    script.train()
    with torch.no_grad():
        for parameter in script.net.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None


def evaluates(script: Script) -> None:
    script.net.eval()
    script.net.last.requires_grad_(False)
    plain(script)
    script.net.last.requires_grad_(True)
    script.net.train()


def leaves_modes(script: Script) -> None:
    plain(script)
    script.net.norm.eval()
    script.net.first.bias.requires_grad_(script.number % 2 == 0)


def moves_the_average_last(script: Script) -> None:
    plain(script)
    with torch.no_grad():
        for parameter in script.shadow.parameters():
            parameter.data.lerp_(torch.ones(()), 0.1)


def moves_the_average_in_a_graph(script: Script) -> None:
    """Without `no_grad`: what it moves is part of a graph from then on."""
    plain(script)
    script.net.last.requires_grad_(True)  # flags are read anew in the next step
    for average, parameter in zip(script.shadow.parameters(), script.net.last.parameters(), strict=True):
        average.mul_(0.9).add_(parameter.mean(), alpha=0.1)


def decays_late(script: Script) -> None:
    """In the first steps it writes what was there."""
    for parameter in script.net.parameters():
        parameter.data.mul_(1.0 if script.number < 5 else 0.9)
    plain(script)


def surgery(script: Script) -> None:
    """In the steps that are interrupted it writes to parameters in place, before their write, as no step did before."""
    if script.number in (2, 5):
        weight = script.net.last.weight
        nn.init.zeros_(script.net.last.bias)
        with torch.no_grad():
            weight[0] = 2.0
            weight += 0.5
            script.net.first.weight.clamp_(-0.1, 0.1)
    plain(script)


def shows_the_scheduler(script: Script) -> None:
    """A scheduler gets an attribute, and one of its own changes, before the step writes."""
    vars(script.scheduler).setdefault("seen", []).append(script.number)
    script.scheduler.base_lrs = [rate * 0.9 for rate in script.scheduler.base_lrs]
    plain(script)


BODIES = [
    plain,
    shows_the_scheduler,
    two_writes,
    late_collective,
    through_data,
    assigned_data,
    decays_first,
    assigns_a_buffer,
    assigns_the_first_buffer,
    deletes_a_buffer,
    sets_rates,
    by_hand,
    evaluates,
    leaves_modes,
    moves_the_average_last,
    moves_the_average_in_a_graph,
    decays_late,
    surgery,
]


@pytest.fixture
def run() -> Any:
    scripts: list[Script] = []

    def make(body: Body, optimizers: int = 1) -> Script:
        scripts.append(Script(body, optimizers))
        return scripts[-1]

    yield make
    for script in reversed(scripts):
        script.transaction.remove()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("body", BODIES)
def test_a_step_that_is_undone_leaves_no_trace(run: Any, body: Body, steps: int) -> None:
    script = run(body, 2)
    for _ in range(steps):
        script.step()
    before, private = script.bits(), set(script.state.rank_private.buffers)
    with pytest.raises(InterruptedError):
        _body_up_to_the_barrier(script)
    script.undo()
    assert script.bits() == before
    assert script.state.rank_private.buffers == private  # no other buffer was kept with the version gone back to
    script.step()
    undisturbed = run(body, 2)
    for _ in range(steps + 1):
        undisturbed.step()
    assert script.bits() == undisturbed.bits()


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("exchanged", [1, 3])
def test_parameters_that_have_changed_places_with_an_average_go_back(run: Any, steps: int, exchanged: int) -> None:
    """A failure strikes while they lie in the average's memory, or while some do: both keep what they held."""
    failing = False

    def exchanges(script: Script) -> None:
        script.train()
        script.write()
        held = [parameter.data for parameter in script.net.parameters()]
        for parameter, other in [*zip(script.net.parameters(), average, strict=True)][:exchanged]:
            parameter.data = other
        script.collective()
        if failing:
            raise InterruptedError
        for parameter, own in zip(script.net.parameters(), held, strict=True):
            parameter.data = own

    script = run(exchanges)
    average = [torch.full_like(parameter, 7.0) for parameter in script.net.parameters()]
    for _ in range(steps):
        script.step()
    before, places = script.bits(), [parameter.data_ptr() for parameter in script.net.parameters()]
    failing = True
    with pytest.raises(InterruptedError):
        script.attempt()
    script.undo()
    assert script.bits() == before
    assert [parameter.data_ptr() for parameter in script.net.parameters()] == places
    assert all((other == 7.0).all() for other in average)


def _body_up_to_the_barrier(script: Script) -> None:
    """A failure strikes as late as a step can be undone: at its barrier."""
    prepare = script.transaction.prepare

    def fail(*, early: bool) -> None:
        prepare(early=early)
        raise InterruptedError

    script.transaction.prepare = fail  # type: ignore[method-assign]
    try:
        script.attempt()
    finally:
        script.transaction.prepare = prepare  # type: ignore[method-assign]


def test_the_barrier_comes_to_stand_in_front_of_the_only_write(run: Any) -> None:
    script = run(plain)
    for _ in range(6):
        script.step()
    assert script.barriers == ["end", "end", "0", "0", "0", "0"]
    assert script.transaction._images.tensors.nbytes < 1000  # of BatchNorm's statistics; nothing else is copied


def test_the_barrier_stands_in_front_of_the_last_of_two_writes(run: Any) -> None:
    script = run(two_writes, 2)
    script.transaction.learner = Learner(agreements_of_several=6)
    for _ in range(9):
        script.step()
    assert script.barriers == [*["end"] * 6, "1", "1", "1"]


@pytest.mark.parametrize("every", [2, 5])
def test_the_barrier_stays_at_the_end_if_some_steps_write_more_often(run: Any, every: int) -> None:
    """Lazy regularization: a step with a write more than was learnt could neither be undone nor finished."""

    def lazily(script: Script) -> None:
        two_writes(script)
        if script.number % every == every - 1:
            script.train()
            script.write(1)

    script = run(lazily, 2)
    script.transaction.learner = Learner(agreements_of_several=6)
    for _ in range(15):
        script.step()
        assert not script.transaction.surprise
    assert set(script.barriers) == {"end"}


def test_one_surprise_and_the_barrier_stays_at_the_end(run: Any) -> None:
    """Also if the steps that differ are rare, and after a recovery."""

    def seldom(script: Script) -> None:
        plain(script)
        if script.number % 8 == 7:
            script.train()
            script.write()

    script = run(seldom)
    found = []
    for number in range(18):
        if number == 10:
            script.transaction.reset()
        script.step()
        found += [number] if script.transaction.surprise else []
    assert found == [7]
    assert script.barriers[8:] == ["end"] * 10


def test_the_barrier_stays_at_the_end_until_every_optimizer_has_made_a_step(run: Any) -> None:
    """The first step of one that starts late comes after what used to be the last write, and needs other ranks."""

    def late_discriminator(script: Script) -> None:
        plain(script)
        if script.number >= 4:
            script.train()
            script.write(1)

    script = run(late_discriminator, 2)
    for _ in range(4):
        script.step()
    script.attempt()
    assert script.transaction.is_open
    assert not script.early
    before = script.bits()
    script.undo()
    script.attempt()
    assert script.bits() == before
    script.commit()
    for _ in range(3):
        script.step()
    assert not script.transaction.surprise
    assert set(script.barriers) == {"end"}


@pytest.mark.parametrize("body", [late_collective, by_hand])
def test_the_barrier_stays_at_the_end_if_more_follows(run: Any, body: Body) -> None:
    script = run(body)
    for _ in range(6):
        script.step()
    assert set(script.barriers) == {"end"}


def test_the_barrier_stays_at_the_end_while_a_name_that_decides_steps_is_empty(run: Any) -> None:
    class Carried:
        is_incomplete = True

        def look(self) -> int:
            return 0

    script, carried = run(plain), Carried()
    script.watch_with(Transaction(script.state, script, carried))
    for number in range(8):
        carried.is_incomplete = number < 4
        script.step()
    assert script.barriers == ["end"] * 6 + ["0", "0"]


def test_the_barrier_stays_at_the_end_if_streams_that_run_on_are_drawn_from_after_the_write(run: Any) -> None:
    class Streams:
        def look(self) -> int:
            return rng.number()

    def draws(script: Script) -> None:
        plain(script)
        torch.rand(3)

    for body, place in ((plain, "0"), (draws, "end")):
        script = run(body)
        script.watch_with(Transaction(script.state, script, streams=Streams()))
        for _ in range(6):
            script.step()
        assert script.barriers == ["end", "end", *[place] * 4]


@pytest.mark.parametrize(("of_all", "surprises"), [(True, [5]), (False, [5, 6])])
def test_a_collective_after_an_early_barrier_is_a_surprise_once(run: Any, of_all: bool, surprises: list[int]) -> None:
    """If not all ranks took part in it, the others hear at the next barrier, in whose step it may come again."""

    def seldom(script: Script) -> None:
        plain(script)
        if script.number in (5, 6, 9):
            script.collective(of_all=of_all)

    script = run(seldom)
    found = []
    for number in range(11):
        script.step()
        found += [number] if script.transaction.surprise == "a collective" else []
    assert found == surprises
    assert set(script.barriers[surprises[-1] + 1 :]) == {"end"}


def test_a_rank_that_was_interrupted_in_a_surprise_remembers_it(run: Any) -> None:
    script = run(plain)
    for _ in range(4):
        script.step()
    script.attempt()
    script.transaction.interrupted_after_barrier()
    script.transaction.close()
    script.transaction.reset()
    for _ in range(4):
        script.step()
    assert script.barriers[-4:] == ["end"] * 4


def _late(script: Script) -> None:
    if script.number >= LEARNING_STEPS + 3:
        with torch.no_grad():
            script.shadow.weight.mul_(0.9)
    plain(script)


def test_the_first_change_of_a_small_tensor_is_undone(run: Any) -> None:
    """A target network is set to the trained one after a hundred steps."""
    script = run(_late)
    for _ in range(LEARNING_STEPS + 3):
        script.step()
    before = script.bits()
    for _ in range(2):  # and the second one, after this step was repeated
        with pytest.raises(InterruptedError):
            _body_up_to_the_barrier(script)
        assert not script.transaction.unimaged_changes()
        script.undo()
        assert script.bits() == before
        script.step()
        before = script.bits()


def test_methods_of_optimizers_are_watched_before_the_write(run: Any) -> None:
    """While an optimizer writes, these methods are torch's own."""

    def late(script: Script) -> None:
        if script.number >= LEARNING_STEPS + 3:
            with torch.no_grad():
                script.net.last.bias.mul_(0.5)
        plain(script)

    script = run(late)
    for _ in range(LEARNING_STEPS + 3):
        script.step()
    assert script.barriers[-1] != "end"
    assert "mul_" not in vars(nn.Parameter)  # between two steps
    before = script.bits()
    with pytest.raises(InterruptedError):
        _body_up_to_the_barrier(script)
    script.undo()
    assert script.bits() == before
    script.transaction.remove()
    assert vars(nn.Parameter).keys().isdisjoint(WRITING)


def test_what_changes_for_the_first_time_makes_one_step_unrepeatable(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.training.transaction.image_plan._STILL_BYTES", 0)

    def late(script: Script) -> None:
        if script.number >= LEARNING_STEPS + 3:
            with torch.no_grad():
                script.shadow.weight.view(-1).mul_(0.9)
        plain(script)

    script = run(late)
    for _ in range(LEARNING_STEPS + 3):
        script.step()
        assert not script.transaction.unimaged_changes()
    with pytest.raises(InterruptedError):
        _body_up_to_the_barrier(script)
    assert script.transaction.unimaged_changes() == [("shadow", "weight")]
    script.transaction.commit()
    script.number += 1
    before = script.bits()
    with pytest.raises(InterruptedError):
        _body_up_to_the_barrier(script)
    assert not script.transaction.unimaged_changes()
    script.undo()
    assert script.bits() == before


def test_batchnorm_that_was_frozen_at_first_becomes_private(run: Any) -> None:
    def late(script: Script) -> None:
        script.net.norm.train(script.number >= 5)
        plain(script)

    script = run(late)
    for _ in range(6):
        script.step()
    names = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert {name for _, name in script.state.rank_private.buffers} == names


@pytest.mark.parametrize("assigned", [False, True])
def test_a_buffer_that_is_written_through_data_late_becomes_private(run: Any, assigned: bool) -> None:
    def late(script: Script) -> None:
        if script.number >= 5:
            mean = script.net.norm.running_mean
            assert mean is not None
            if assigned:
                mean.data = mean.data * 0.9 + 1
            else:
                mean.data.mul_(0.9).add_(1)
        plain(script)

    script = run(late)
    script.net.norm.eval()
    for _ in range(6):
        script.step()
    assert ("net", "norm.running_mean") in script.state.rank_private.buffers


def test_changes_between_steps_are_seen(run: Any) -> None:
    script = run(plain)
    for _ in range(5):
        script.step()
        assert not script.transaction.see_code_between()
    with torch.no_grad():
        script.net.last.bias.add_(1)
    assert script.transaction.see_code_between() == [("net", "last.bias")]


@pytest.mark.parametrize("body", [through_data, assigned_data])
def test_what_an_undone_step_wrote_through_data_is_no_change_between_steps(run: Any, body: Body) -> None:
    """Ranks that have not tried the step compare with those that have."""
    script = run(body)
    script.step()
    script.attempt()
    script.undo()
    script.transaction.begin_code_after_undo()
    script.net.last.weight.data.mul_(2)
    script.transaction.undo_code()
    assert script.transaction.see_code_between() == []


def test_what_was_written_through_data_before_a_recovery_is_no_change_by_code_between_steps(run: Any) -> None:
    script = run(plain)
    for _ in range(4):
        script.step()
    script.transaction.begin()
    assert script.net.norm.running_mean is not None
    script.net.norm.running_mean.data.add_(1)
    script.transaction.roll_back()
    script.transaction.reset()
    assert not script.transaction.see_code_between()
    script.net.norm.running_mean.data.add_(1)
    assert ("net", "norm.running_mean") in script.transaction.see_code_between()
    assert not script.transaction.see_code_between()


def test_statistics_of_a_batch_norm_that_code_between_steps_trains_are_seen(run: Any) -> None:
    script = run(plain)
    script.net.norm.eval()
    for _ in range(5):
        script.step()
    script.net.norm.train()
    with torch.no_grad():
        script.net.norm(torch.randn(4, script.net.norm.num_features))
    assert ("net", "norm.running_mean") in script.transaction.see_code_between()


def test_plain_attributes_of_modules_travel_with_the_private_state(run: Any) -> None:
    script, other = run(plain), run(plain)
    for _ in range(4):
        script.step()
    other.step()
    other.state.rank_private.adopt(decode_tree(encode_tree(script.state.rank_private.tree(), "private")))
    assert (other.net.calls, other.net.seen) == (script.net.calls, script.net.seen)


def test_what_is_a_view_of_a_parameter_in_a_replacement_is_not_written_through(run: Any) -> None:
    """`spectral_norm` makes `weight` a view of `weight_orig`, until forward assigns it."""

    def counts(script: Script) -> None:
        script.net.kept.add_(1)
        plain(script)

    script, other = run(counts), run(plain)
    script.net.kept = torch.zeros_like(script.net.last.weight)
    other.net.kept = other.net.last.weight.data
    for _ in range(4):
        script.step()
    weight = other.net.last.weight.detach().clone()
    other.state.rank_private.adopt(decode_tree(encode_tree(script.state.rank_private.tree(), "private")))
    assert torch.equal(other.net.kept, script.net.kept)
    assert torch.equal(other.net.last.weight, weight)


@pytest.mark.parametrize("held", ["tensor", "list"])
def test_views_of_parameters_stay_views_when_a_step_is_undone(run: Any, held: str) -> None:
    fails = False

    def body(script: Script) -> None:
        late_collective(script)  # the barrier is at the end of the block
        if fails:
            raise InterruptedError

    script = run(body)
    weight = script.net.last.weight
    script.net.kept = weight.data if held == "tensor" else [weight.data, 0]
    for _ in range(4):
        script.step()
    fails, before = True, script.bits()
    with pytest.raises(InterruptedError):
        script.attempt()
    script.undo()
    assert script.bits() == before
    view = script.net.kept if held == "tensor" else script.net.kept[0]
    assert view.data_ptr() == weight.data_ptr()


def test_an_attribute_that_changed_in_place_may_hold_a_result_later(run: Any) -> None:
    """A tensor with a graph cannot be copied as state is."""

    def body(script: Script) -> None:
        if script.number < 4:
            script.net.kept.add_(1)
        plain(script)
        script.net.kept = script.net.kept * 1 if script.number < 4 else script.net(torch.ones(6, 4))

    script = run(body)
    script.net.kept = torch.zeros(3)
    for _ in range(8):
        script.step()


def test_reading_through_data_copies_nothing_for_long(run: Any) -> None:
    def reads(script: Script) -> None:
        for parameter in script.net.parameters():
            parameter.data.norm()
        plain(script)

    script = run(reads)
    for _ in range(8):
        script.step()
    assert script.transaction._images.tensors.nbytes < 1000


@pytest.mark.parametrize("first", [0, LEARNING_STEPS + 2])
def test_what_is_only_read_through_data_needs_no_copy(run: Any, first: int) -> None:
    """Also where the barrier is at the end of the block, behind the writes of what was read."""
    fails = False

    def reads(script: Script) -> None:
        for parameter in script.net.parameters():
            if script.number >= first:
                parameter.data.norm()
        if fails:
            raise InterruptedError
        late_collective(script)

    script = run(reads)
    for _ in range(first + LEARNING_STEPS + 2):
        script.step()
    fails = True
    before = script.bits()
    with pytest.raises(InterruptedError):
        script.attempt()
    assert not script.transaction.unimaged_changes()
    script.undo()
    assert script.bits() == before


def test_a_copy_of_what_has_changed_already_does_not_count(run: Any) -> None:
    def late(script: Script) -> None:
        if script.number >= LEARNING_STEPS + 3:
            with torch.no_grad():
                for parameter in script.net.parameters():
                    parameter.view(-1).mul_(0.9)
        late_collective(script)  # the optimizer's write is copied, and comes after

    script = run(late)
    for _ in range(LEARNING_STEPS + 3):
        script.step()
    with pytest.raises(InterruptedError):
        _body_up_to_the_barrier(script)
    assert ("net", "last.weight") in script.transaction.unimaged_changes()
    script.transaction.commit()
    script.number += 1
    with pytest.raises(InterruptedError):
        _body_up_to_the_barrier(script)
    assert not script.transaction.unimaged_changes()


def test_the_first_change_through_data_is_undone(run: Any) -> None:
    """Pruning begins after a hundred steps: what `.data` gives is copied before it can be changed."""

    def late(script: Script) -> None:
        if script.number >= LEARNING_STEPS + 3:
            script.net.first.weight.data *= 0.9
            script.net.last.bias.data = script.net.last.bias.data + 1
        plain(script)

    script = run(late)
    for _ in range(LEARNING_STEPS + 3):
        script.step()
    before = script.bits()
    for _ in range(3):
        with pytest.raises(InterruptedError):
            _body_up_to_the_barrier(script)
        assert not script.transaction.unimaged_changes()
        script.undo()
        assert script.bits() == before
        script.step()
        before = script.bits()


def test_writes_that_were_announced_are_undone(run: Any) -> None:
    """Averages are exchanged for weights in few steps, and the weights were read through `.data` in the first ones."""

    def late(script: Script) -> None:
        if script.number < LEARNING_STEPS:
            _ = [parameter.data for parameter in script.net.parameters()]
        else:
            script.transaction.before_unusual_writes()
            with torch.no_grad():
                for parameter in script.net.parameters():
                    parameter.mul_(0.5)
        plain(script)

    script = run(late)
    for _ in range(LEARNING_STEPS):
        script.step()
    before = script.bits()
    with pytest.raises(InterruptedError):
        _body_up_to_the_barrier(script)
    assert not script.transaction.unimaged_changes()
    script.undo()
    assert script.bits() == before


def moves_and_announces(script: Script) -> None:
    """A callback that moves an average at the head of a step, which then evaluates."""
    moves_at_the_head(script)
    script.transaction.before_unusual_writes()


def moves_at_the_head(script: Script) -> None:
    if script.number >= 5:
        script.transaction.before_unusual_writes(script.shadow)
        script.shadow.weight.data.lerp_(script.net.last.weight[:, :4].detach(), 0.5)
        with torch.no_grad():
            script.shadow.bias.lerp_(script.net.last.bias, 0.5)


def moves_behind_the_write_first(script: Script) -> None:
    if script.number > 5:
        moves_at_the_head(script)
    plain(script)
    if script.number == 5:
        moves_at_the_head(script)


def assigns_a_mode_late(script: Script) -> None:
    if script.number >= 5:
        scale = script.net.scale
        assert isinstance(scale, torch.Tensor)
        scale.mul_(0.9)
        script.net.eval()
        script.net.train()


@pytest.mark.parametrize("steps", range(5, 9))
@pytest.mark.parametrize(
    "body", [moves_at_the_head, moves_and_announces, moves_behind_the_write_first, assigns_a_mode_late]
)
def test_what_a_step_changes_for_the_first_time_goes_back_to_what_it_was(run: Any, body: Body, steps: int) -> None:
    """A copy of what was still until then must be no older, and one of what has changed already no newer."""

    def step(script: Script) -> None:
        body(script)
        if body is not moves_behind_the_write_first:
            plain(script)

    script = run(step)
    for _ in range(steps):
        script.step()
    before = script.bits()
    with pytest.raises(InterruptedError):
        _body_up_to_the_barrier(script)
    assert not script.transaction.unimaged_changes()
    script.undo()
    assert script.bits() == before
    script.step()
    assert not script.transaction.surprise
    assert script.barriers == ["end", "end", *["0"] * (steps - 1)]


def test_updates_by_hand_are_seen(run: Any) -> None:
    def seldom(script: Script) -> None:
        if script.number % 2:
            by_hand(script)
        else:
            script.train()

    script, found = run(seldom), []
    for _ in range(4):
        script.attempt()
        found.append(script.transaction.wrote_parameters)
        script.commit()
    assert found == [False, True, False, True]


def test_optimizers_inside_optimizers_are_tracked() -> None:
    net = nn.Linear(2, 2)

    class Around:
        def __init__(self) -> None:
            self.inner = torch.optim.SGD(net.parameters(), lr=0.1)

    state = TrackedState({"model": net}, {"optimizer": Around()}, {}, {})  # type: ignore[dict-item]
    assert list(state.optimizers) == ["optimizer.inner"]


def test_gradients_that_an_update_has_left_are_told_from_those_of_a_later_backward_pass(run: Any) -> None:
    """`zero_grad` comes at the head of the step, or in it; a step that trains nothing leaves the old ones."""
    script = run(plain)
    gradients = script.state.gradients
    for to_none in (True, False):
        gradients.see()
        script.optimizers[0].zero_grad(set_to_none=to_none)
        script.train()
        assert gradients.have_come()
        gradients.see()
        assert gradients.are_waiting()
        assert not gradients.have_come()
        script.train()  # goes on adding
        assert gradients.have_come()


def test_code_after_an_undone_block_finds_what_code_above_it_has_set(run: Any) -> None:
    script = run(plain)
    net, transaction, group = script.net, script.transaction, script.optimizers[0].param_groups[0]
    net.sections = []
    script.step()
    transaction.begin()
    net.began = 1.0
    net.sections = [*net.sections, "turn"]
    group["kept"], group["lr"] = group["lr"], 1.0
    transaction.enter_block()
    net.began = 2.0
    net.sections = []
    script.undo()
    transaction.begin_code_after_undo()
    assert net.began == 1.0
    assert net.sections.pop() == "turn"
    assert group["lr"] == 1.0
    group["lr"] = group.pop("kept") * 2
    transaction.undo_code()
    assert (group["lr"], "kept" in group) == (0.01, False)
    assert not hasattr(net, "began")
    assert net.sections == []
