"""Attributes of parameters and layers that were handed over, and values written after an optimizer's step."""

from pathlib import Path

import pytest

from relight.errors import UsageError
from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import STEPS, Loop, run_script

MASKED = """
import torch
net = torch.nn.Linear(2, 2)
hand_over(net, torch.optim.SGD(net.parameters(), lr=0.1))
for step in steps():
    with step as b:
        for p in net.parameters():
            if hasattr(p, 'mask'):
                p.mask.mul_(2)
        step.point(0)
        if step.number == 3:
            for p in net.parameters():
                p.mask = torch.ones(2)
        step.point(1)
result = [p.mask.tolist() for p in net.parameters()]
"""
RARE = """
import torch
opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
skipped = seen = 0
for step in steps():
    with step as b:
        seen += 1
        step.write()
        opt.step()
        if step.number == 4:
            skipped += 1
result = skipped, seen
"""


def test_an_attribute_that_parameters_get_in_a_late_step_is_undone_and_carried(tmp_path: Path) -> None:
    first = Loop()
    expected = run_script(MASKED, first, tmp_path)
    for number in range(STEPS):
        assert run_script(MASKED, Loop(fails_at=number, fails_in=1), tmp_path) == expected
    for version in range(STEPS + 1):
        again = Loop(begins_at=version, tree=decode_tree(first.kept[version]))
        assert run_script(MASKED, again, tmp_path) == expected, version
        assert not again.doubt


def test_a_value_that_a_rare_step_changes_after_its_write_is_doubted_if_it_was_kept_before(tmp_path: Path) -> None:
    first = Loop()
    expected = run_script(RARE, first, tmp_path)
    again = Loop(begins_at=5, tree=decode_tree(first.kept_early[5]))
    assert run_script(RARE, again, tmp_path) != expected
    assert again.doubt is not None
    assert "skipped: changed after the last write" in again.doubt
    assert "seen" not in again.doubt
    kept_at_the_end = Loop(begins_at=5, tree=decode_tree(first.kept[5]))
    assert run_script(RARE, kept_at_the_end, tmp_path) == expected
    assert not kept_at_the_end.doubt


SCHEDULE = """
def schedule():
    lr = 1.0
    while True:
        yield lr
        lr *= 0.9
rates = schedule()
x = 0
for step in steps():
    with step as b:
        x += next(rates)
        step.point(0, x)
result = x
"""
SWAPPED = """
import torch
criterion = torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))
x = 0
for step in steps():
    with step as b:
        if step.number == 3:
            criterion = torch.nn.BCEWithLogitsLoss(pos_weight=torch.zeros(1))
        x += float(criterion(torch.ones(1), torch.zeros(1)))
        step.point(0, x)
result = x
"""


@pytest.mark.parametrize(
    ("source", "advice"), [(SCHEDULE, "as a class that keeps its variables"), (SWAPPED, "choose in each step")]
)
def test_a_refusal_says_what_to_write_instead(source: str, advice: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=advice):
        run_script(source, Loop(), tmp_path)


AVERAGED = """
import torch
net = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
hand_over(net, opt)
class WeightDecay:
    def __init__(self, model):
        self.params = list(model.state_dict().values())
        self.model = model
    def step(self):
        eval("torch._foreach_mul_(self.params, 0.9)")
decay = WeightDecay(net)
for step in steps(9):
    with step as b:
        net(torch.ones(2)).sum().backward()
        step.write()
        opt.step()
        decay.step()
result = 0
"""


def test_parameters_in_an_attribute_do_not_change_behind_the_block(tmp_path: Path) -> None:
    loop = Loop()
    run_script(AVERAGED, loop, tmp_path)
    assert loop.carried.names == []


OF_ONE_RANK = """
class Saver:
    def __init__(self):
        self.best, self.files = 0.0, []
saver = Saver() if RANK == 0 else None
for step in steps():
    with step as b:
        if saver is not None:
            saver.best = saver.best + b
            saver.files.append(saver.best)
        step.point(0, b)
result = 0
"""


def test_a_replacement_that_lacks_an_object_of_its_rank_says_so(tmp_path: Path) -> None:
    first = Loop()
    run_script(f"RANK = 0{OF_ONE_RANK}", first, tmp_path)
    again = Loop(begins_at=3, tree=decode_tree(first.kept[3]))
    run_script(f"RANK = 1{OF_ONE_RANK}", again, tmp_path)
    found = again.carried.doubts.later() or str(again.doubt)
    assert found.startswith("saver.best, saver.files: kept in an object that this rank has, and")
