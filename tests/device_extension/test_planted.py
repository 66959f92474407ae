"""Every wait for a device in relight, and every hold on memory that a device uses: each is proved by its absence.

Waits of copies are taken out in test_transfer.py, those of groups and of jobs here. The list is complete: the source is
searched for calls of what makes a process wait for a device.
"""

import ast
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device_extension.build import is_built
from tests.device_extension.jobs import CASES, LAZY, races_of, reference, run
from tests.survival.harness import Bench

pytestmark = [pytest.mark.late, pytest.mark.skipif(not is_built(), reason="not built: make test-device")]

SOURCE = Path(__file__).parents[2] / "src" / "relight"
CALLS = {"synchronize", "synchronize_stream", "record_event", "mark", "pin", "abort_backend", "use", "settle"}
# Objects whose methods have one of these names and nothing to do with devices.
OTHERS = {"self._layouts", "layout", "self._promise", "groups", "self._job", "self.links"}
# Where relight waits, how often, and the tests that take it out: of this file, by the name of the bug, or of another.
PLACES = {
    ("integrations/engines/weight_stream.py", "settle"): (1, "test_transfer.py"),
    ("training/job.py", "use"): (1, "test_survival.py: without it all ranks compute on the first device"),
    ("training/process/runtime.py", "synchronize"): (1, "those of its callers"),
    ("training/process/runtime.py", "synchronize_stream"): (1, "those of its callers"),
    ("training/worker/step/barrier.py", "synchronize"): (1, "prepared"),
    ("training/worker/broken_steps.py", "synchronize"): (1, "undone"),
    ("training/worker/loop.py", "synchronize"): (2, "repeated, committed"),
    ("training/worker/loop.py", "synchronize_stream"): (1, "entered"),
    ("training/collectives/generation_group.py", "abort_backend"): (1, "test_groups.py"),
    ("training/torch_private/distributed/groups.py", "use"): (1, "test_groups.py"),
    ("transfer/io/buffers.py", "pin"): (1, "test_transfer.py"),
    ("transfer/publish/publisher.py", "settle"): (1, "test_transfer.py"),
    ("transfer/publish/source.py", "settle"): (1, "test_transfer.py"),
    ("transfer/tensors/device_buffers.py", "mark"): (2, "test_device_buffers.py"),
    ("transfer/tensors/device.py", "mark"): (4, "test_transfer.py"),
    ("transfer/tensors/device.py", "record_event"): (1, "test_transfer.py"),
    ("transfer/tensors/device.py", "settle"): (1, "test_transfer.py"),
    ("transfer/tensors/device.py", "synchronize"): (2, "test_transfer.py"),
    ("transfer/tensors/targets.py", "settle"): (2, "test_transfer.py"),
    ("transfer/tensors/weights.py", "mark"): (1, "test_transfer.py"),
    ("transfer/tensors/weights.py", "settle"): (4, "test_transfer.py"),
}


def calls() -> Iterator[tuple[str, str]]:
    """Calls by which the rooms above `device` wait for a device, or have it leave memory alone."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(("device/", "sim/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr in CALLS:
                if ast.unparse(function.value) not in OTHERS:
                    yield name, function.attr
            elif isinstance(function, ast.Name) and function.id in CALLS:
                yield name, function.id


def test_the_list_has_every_wait() -> None:
    assert Counter(calls()) == {place: count for place, (count, _) in PLACES.items()}


@pytest.mark.parametrize(
    ("bug", "fault"),
    [
        ("repeated", ""),
        ("committed", ""),
        ("entered", "kill rank 1 in BACKWARD of step 3"),
        ("undone", "kill rank 1 in BACKWARD of step 1"),
    ],
)
def test_a_wait_that_is_left_out_is_reported(bench: Bench, bug: str, fault: str) -> None:
    """In a job whose steps are computed on a stream of the script's own. The first one is enough."""
    case = CASES["own-stream"]
    if bug == "undone":
        # The other rank has launched a forward pass by then, and learns of it next. In an early step everything is
        # copied first, and put back. A backward pass would order the streams: gradients are added on the default one.
        arguments = (*case.training.arguments, "--linger-at", "1")
        case = dataclasses.replace(case, training=dataclasses.replace(case.training, arguments=arguments))
    faults = [fault] if fault else []
    outcome = run(bench, case.training, faults=faults, devices=case.devices(), bug=bug, microseconds=LAZY)
    assert races_of(outcome), outcome.describe()


def test_a_rank_that_has_only_launched_its_collectives_is_not_prepared(bench: Bench) -> None:
    """Its peer may die before it has sent what it launched: then no rank gets the sum, and the write is wrong.

    The device does only what it is waited for, so it has sent nothing.
    """
    case = CASES["ddp"]
    undisturbed = reference(bench, case)
    faults = ["kill rank 1 in BARRIER of step 3"]
    outcome = run(bench, case.training, faults=faults, devices=case.devices(), bug="prepared", microseconds=LAZY)
    assert outcome.status != 0 or outcome.finals != undisturbed.finals, outcome.describe()
