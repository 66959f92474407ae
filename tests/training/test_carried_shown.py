"""Objects of the script's that an integration holds, where no name of the loop's reaches them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relight.errors import UsageError
from relight.training.carried.code.refs import is_added
from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import STEPS, Loop, run_script

SCRIPT = """
import weakref
from collections import deque
import torch

class Average:
    def __init__(self):
        self.count, self.shadow = 0, {"w": torch.zeros(2)}
    def update(self, value):
        self.count += 1
        self.shadow["w"] = 0.9 * self.shadow["w"] + 0.1 * value

class Callback:
    def __init__(self):
        self.average, self.window, self.librarys = Average(), deque(maxlen=3), 0
    def on_step(self, value):
        self.average.update(value)
        self.window.append(value)
        self.librarys += 1

def run():
    steps.hidden = Callback()
    held = weakref.WeakValueDictionary({"callback": steps.hidden})
    SHOW
    for step in steps():
        with step as value:
            held["callback"].on_step(value)
            step.end()
    callback = steps.hidden
    return callback.average.count, callback.average.shadow["w"].tolist(), list(callback.window), callback.librarys
result = run()
"""
SHOW = "steps.carried.show('callback', steps.hidden, lambda name, value: name == 'librarys')"


def run(loop: Loop, directory: Path, show: str = SHOW) -> Any:
    return run_script(SCRIPT.replace("SHOW", show), loop, directory)


@pytest.mark.parametrize("step", range(STEPS))
def test_what_is_shown_is_undone_with_its_step(step: int, tmp_path: Path) -> None:
    whole = run(Loop(), tmp_path)
    assert run(Loop(fails_at=step), tmp_path)[:3] == whole[:3]


@pytest.mark.parametrize("step", range(3, STEPS))
def test_a_replacement_gets_what_is_shown(step: int, tmp_path: Path) -> None:
    first = Loop()
    whole = run(first, tmp_path)
    tree = decode_tree(first.kept[step])
    assert run(Loop(begins_at=step, tree=tree), tmp_path)[:3] == whole[:3]


def test_without_it_a_step_would_count_twice(tmp_path: Path) -> None:
    assert run(Loop(fails_at=2), tmp_path, "pass")[0] == STEPS + 1


OF_LOCAL_CLASSES = """
from collections import Counter

def make():
    class Above:
        seen = []
    class Callback(Above):
        counts = Counter()
        def on_step(self, value):
            self.counts[int(value)] += 1
            self.seen.append(float(value))
    return Callback()

def run():
    steps.hidden = make()
    steps.carried.show("callback", steps.hidden, lambda name, value: False)
    held = weakref.WeakValueDictionary({"callback": steps.hidden})
    for step in steps():
        with step as value:
            held["callback"].on_step(value)
            step.end()
    return sorted(steps.hidden.counts.items()), steps.hidden.seen
result = run()
"""


@pytest.mark.parametrize("step", range(3, STEPS))
def test_attributes_of_classes_that_a_function_made(step: int, tmp_path: Path) -> None:
    """No name of the script leads to such a class, but an object of it does."""
    first, script = Loop(), f"import weakref\n{OF_LOCAL_CLASSES}"
    whole = run_script(script, first, tmp_path)
    assert run_script(script, Loop(fails_at=step), tmp_path) == whole
    assert run_script(script, Loop(begins_at=step, tree=decode_tree(first.kept[step])), tmp_path) == whole


OF_A_LIBRARY = "Callback.__module__ = Average.__module__ = 'string'"


@pytest.mark.parametrize("step", range(STEPS))
def test_of_a_librarys_object_what_can_be_carried_is_looked_into_where_that_is_asked_for(
    step: int, tmp_path: Path
) -> None:
    """An average of the library's own class cannot be."""
    show = f"{OF_A_LIBRARY}\n    {SHOW[:-1]}, of_library=True)"
    first = Loop()
    whole = run(first, tmp_path, show)
    assert run(Loop(fails_at=step), tmp_path, show)[2] == whole[2]
    assert not any("average" in text for text in first.said)
    if step >= 3:
        assert run(Loop(begins_at=step, tree=decode_tree(first.kept[step])), tmp_path, show)[2] == whole[2]


def test_what_the_integration_keeps_is_left_to_it(tmp_path: Path) -> None:
    assert run(Loop(fails_at=3), tmp_path)[3] == STEPS + 1


def test_objects_of_packages_are_not_looked_into() -> None:
    assert not Loop().carried.show("path", Path("/"), lambda _name, _value: False)


LATE = """
import copy
import torch

class Callback:
    def __init__(self):
        self.ema, self.step = None, 0
    def on_step(self):
        self.step += 1
        if self.step == MADE:
            self.ema = copy.deepcopy(model)
        elif self.ema is not None:
            CHANGES

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hand_over(model, optimizer)
def run():
    steps.hidden = Callback()
    steps.carried.show('callback', steps.hidden, lambda name, value: False)
    for step in steps():
        with step as value:
            steps.hidden.on_step()
            step.end()
    return steps.hidden.step
result = run()
"""


def late(made: int, changes: str) -> str:
    return LATE.replace("MADE", str(made)).replace("CHANGES", changes)


IN_PLACE = "[e.data.mul_(0.5) for e in self.ema.parameters()]"


def test_a_module_that_a_first_step_makes_and_the_next_changes_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"callback\.ema, a .*Linear that a step has made, changes from step to step"):
        run_script(late(1, IN_PLACE), Loop(), tmp_path)


@pytest.mark.parametrize("changes", ["pass", "self.ema = copy.deepcopy(model)"])
def test_one_that_is_only_exchanged_does_not(changes: str, tmp_path: Path) -> None:
    """The best model so far, say. A replacement has none, which is said, and its tensors are not sent by themselves."""
    first = Loop(until=12)
    assert run_script(late(1, changes), first, tmp_path) == first.until
    assert any("callback.ema changes from step to step" in text for text in first.said)
    second = Loop(until=12, begins_at=3, tree=decode_tree(first.kept[3]))
    assert run_script(late(1, changes), second, tmp_path) == first.until


AVERAGE = """
class Average:
    def __init__(self, model):
        self.model, self.count = copy.deepcopy(model), 0
    def update(self):
        self.count += 1
        [each.data.mul_(0.5) for each in self.model.parameters()]

class Callback:"""


def averaged(made: int) -> str:
    """The module is in an object of the script's, which the step makes with it."""
    script = late(made, "self.ema.update()").replace("self.ema = copy.deepcopy(model)", "self.ema = Average(model)")
    return script.replace("\nclass Callback:", AVERAGE)


def test_an_object_with_a_module_that_a_first_step_makes_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"callback\.ema, a .*Average that a step has made, changes from step to step"):
        run_script(averaged(1), Loop(), tmp_path)


@pytest.mark.parametrize(
    "script", [late(6, IN_PLACE), averaged(6), averaged(8), averaged(9)], ids=["module", "object", "seen next", "seen"]
)
def test_one_that_is_made_late_is_said_and_the_job_goes_on(script: str, tmp_path: Path) -> None:
    """A replacement has none, and the report says that the bits are not known."""
    first = Loop(until=20)
    assert run_script(script, first, tmp_path) == first.until
    assert any("callback.ema changes from step to step" in text for text in first.said)
    second = Loop(until=20, begins_at=18, tree=decode_tree(first.kept[18]))
    assert run_script(script, second, tmp_path) == first.until


def test_a_name_that_is_found_at_the_barrier_was_not_changed_after_it(tmp_path: Path) -> None:
    """A count that begins in a later step is seen in that step, at the barrier: it is no change after the write."""
    made = "self.average, self.window, {0}self.librarys = Average(), deque(maxlen=3), {1}0"
    script = SCRIPT.replace("SHOW", SHOW).replace(made.format("", ""), made.format("self.late, ", "0, "))
    script = script.replace("self.window.append(value)", "self.window.append(value); self.late += len(self.window) > 2")
    loop = Loop(until=12)
    run_script(script.replace("step.end()", "step.write()"), loop, tmp_path)
    assert sorted(loop.kept_early) == list(range(3, 13))


def test_a_list_of_objects_beside_one_of_a_library_is_no_value_that_changes(tmp_path: Path) -> None:
    """`callbacks = [Mine(), Theirs()]`: only what is in Mine changes."""
    script = SCRIPT.replace("SHOW", SHOW).replace(
        "    held = weak",
        "    kit = Average()\n    kit.listed = [steps.hidden, torch.nn.Identity()]\n    held = weak",
    )
    loop = Loop(until=12)
    run_script(script, loop, tmp_path)
    assert loop.said == []


ENCLOSED = """
import weakref
def made():
    best, calls = {"value": 0.0}, 0
    def measure(value):
        nonlocal calls
        calls += 1
        best["value"] = max(best["value"], value)
        return best["value"], calls
    return measure

def run():
    steps.hidden = made()
    steps.carried.show("compute_metrics", steps.hidden, lambda name, value: False)
    for step in steps():
        with step as value:
            steps.hidden(value)
            step.end()
    return steps.hidden(0.0)
result = run()
"""


@pytest.mark.parametrize("step", range(STEPS))
def test_what_a_shown_function_encloses_is_undone_with_its_step(step: int, tmp_path: Path) -> None:
    assert run_script(ENCLOSED, Loop(fails_at=step), tmp_path) == (STEPS, STEPS + 1)


@pytest.mark.parametrize("step", range(3, STEPS))
def test_a_replacement_gets_what_a_shown_function_encloses(step: int, tmp_path: Path) -> None:
    first = Loop()
    run_script(ENCLOSED, first, tmp_path)
    second = Loop(begins_at=step, tree=decode_tree(first.kept[step]))
    assert run_script(ENCLOSED, second, tmp_path) == (STEPS, STEPS + 1)


SCORES = """
best, calls = {"value": 0.0}, 0
def measure(value):
    global calls
    calls += 1
    best["value"] = max(best["value"], value)
    return best["value"], calls
"""
OF_ANOTHER_MODULE = """
import importlib.util, sys
def measure():
    spec = importlib.util.spec_from_file_location("scores", "FILE")
    sys.modules["scores"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measure

def run():
    steps.hidden = measure()
    steps.carried.show("compute_metrics", steps.hidden, lambda name, value: False)
    for step in steps():
        with step as value:
            if step.number > 3:
                steps.hidden(value)
            step.end()
    return steps.hidden(0.0)
result = run()
"""


@pytest.mark.parametrize("step", [4, 5])
def test_globals_of_another_module_of_the_script_that_late_steps_change_are_kept(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scores", None)  # put back at the end
    (tmp_path / "scores.py").write_text(SCORES)
    script = OF_ANOTHER_MODULE.replace("FILE", str(tmp_path / "scores.py"))
    first = Loop()
    assert run_script(script, first, tmp_path) == (STEPS, STEPS - 3)
    assert run_script(script, Loop(fails_at=step), tmp_path) == (STEPS, STEPS - 3)
    second = Loop(begins_at=step, tree=decode_tree(first.kept[step]))
    assert run_script(script, second, tmp_path) == (STEPS, STEPS - 3)


def test_what_a_scheduler_sets_on_an_optimizer_is_not_the_scripts() -> None:
    class Own(torch.optim.SGD):
        """As frameworks wrap one."""

    optimizer = Own([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    scheduler.step()
    optimizer.mine = 1  # type: ignore[attr-defined]
    assert [name for name in vars(optimizer) if is_added(optimizer, name)] == ["mine"]
