"""Names that an interrupted block has not set, as code after the block reads them."""

import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from types import TracebackType
from typing import Any

import pytest
import torch

from relight.errors import StepInterrupted
from relight.training.worker.stand_in import StandIn
from relight.training.worker.stand_ins import StandIns, _takes_any


class Block:
    """A step whose block is interrupted in its last turn: sets stand-ins at its end, and takes them out after it."""

    def __init__(self, sizes: tuple[int, ...] = (4,), at: int = 0) -> None:
        """`sizes`: of the batches of the turns. `at`: the statement of the block at which the last one breaks."""
        self.stand_ins = StandIns()
        self.all_names = False
        self._sizes = sizes
        self._at = at
        self._turn = 0

    def __enter__(self) -> torch.Tensor:
        self._turn += 1
        return torch.ones(self._sizes[self._turn - 1], 3)

    def interrupt(self, number: int) -> None:
        if self._turn == len(self._sizes) and number == self._at:
            raise StepInterrupted("a failure elsewhere")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, StepInterrupted):
            self.stand_ins.set(sys._getframe(1), all_names=self.all_names or len(set(self._sizes)) > 1)
            return True
        return False


BLOCK = """
out, (aux, *_) = x * 2, (x, x)
loss = out.sum()
losses = {"a": loss}
if (n := len(out)) > 2: seen = [index for index in range(n)][-1]
total += loss.item()
count += len(x)
history.append(loss.item())
recent.appendleft(loss.item())
notes["loss"], notes["n"] = loss.item(), n
meter.last, meter.count = loss, meter.count + 1
meter.sum += loss.item()
last = loss.item()
"""
BEFORE = """
total, count, history, recent, notes, last = 0.0, 0, [], deque(maxlen=9), {}, None
class Meter: sum, count, last = 0.0, 0, None
meter = Meter()
"""
LINES = (
    "shown = total / count, total + loss.item() * x.size(0)",
    "seen_losses = [float(loss.detach().cpu())]",
    "print(f'{loss:.4f} {loss} {loss.item():>10.2e} {n:d} {seen:3d} {count:>5}', '%d of %.2f' % (n, loss))",
    "correct = (out.argmax(1) == x.argmax(1)).sum().item() / len(out)",
    "correct = (x.argmax(1) == out.argmax(1)).float().mean().item(); hits = (aux > out).sum()",
    "if not math.isfinite(loss): raise SystemExit(1)",
    "if torch.isnan(loss).any() or loss != loss or np.isnan(float(loss)): raise SystemExit(1)",
    "if loss < 5 or 0 > loss or loss.item() < last or not torch.isfinite(loss): raise SystemExit(1)",
    "assert torch.isfinite(loss) and loss > 0 and loss == loss and torch.allclose(out, x * 2), (n, seen)",
    "if loss.isnan(): raise SystemExit(1)",
    "mean = torch.stack([loss, torch.ones(())]).mean().item(), torch.cat([out, x]).shape",
    "mean = torch.nn.functional.mse_loss(out, x).item()",
    "mean = torch.exp(loss), (out - x).abs(), out @ x.T, x + out, -loss, 2 ** loss.item(), 1 / (loss.item() - 1)",
    "mean = np.mean([loss, 2.0]), np.asarray(float(loss)), np.concatenate([out.numpy(), np.ones((2, 3))])",
    "text = {key: value.item() for key, value in losses.items()}",
    "best = min(total, loss.item()); rounded = round(float(loss), 3), int(loss), out[0, :2].tolist()",
    "text = json.dumps({'loss': float(loss), 'n': n, 'seen': seen, **notes})",
    "first, second, *rest = out.shape, loss, x; (a, b), c = torch.stack([out, out]), out; one, *others = aux",
    "shown = history[-1], recent[0], sum(history) / len(history), max(recent), statistics.fmean(recent)",
    "shown = notes['loss'] + notes['n']; text = f\"{notes['loss']:.3f}\"",
    "shown = meter.sum / meter.count, meter.last.item(), f'{meter.last:.2f} {last:.2f}'",
    "out[0] = 3; out[out > 1] = 0; losses['b'] = loss; out.requires_grad = False",
    "del loss",
)


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (4, 4, 3), (4, 2)])
@pytest.mark.parametrize("is_function", [True, False])
def test_code_after_the_block_runs(is_function: bool, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Interrupt the block in front of each of its statements, and at its end; run each line of code after it."""
    statements = BLOCK.strip().splitlines()
    block = "\n".join(f"interrupt({number})\n{one}" for number, one in enumerate([*statements, "pass"]))
    for number, line in enumerate(LINES):
        turn = f"with step as x:\n{indent(block, ' ')}\n{line}\nstep.stand_ins.drop()"
        body = f"{BEFORE.strip()}\nfor _ in range({len(sizes)}):\n{indent(turn, ' ')}\n"
        text = f"def run():\n{indent(body, ' ')}\nrun()\n" if is_function else body
        for at in range(len(statements) + 1):
            run_file(tmp_path / f"script{number}.py", text, Block(sizes, at))


@pytest.mark.parametrize("is_function", [True, False])
def test_what_had_a_value_gets_it_back_and_the_rest_is_unset_again(is_function: bool, tmp_path: Path) -> None:
    body = (
        "kept, zero, some, none, empty, full, notes, meter = 5, 0, 2, None, [], [3], {'b': 2}, Namespace(a=None)\n"
        "with step as x:\n interrupt(0)\n kept, loss, none = 6, 7, 1\n zero += 1\n some += 1\n made = [i for i in x]\n"
        " empty.append(4); full.append(4); notes['a'] = notes['b'] = 1; meter.a = meter.b = x\n"
        "def look(names): return {key: (dict(vars(one)) if key == 'meter' else one.copy() if hasattr(one, 'copy') else "
        "one) for key, one in names.items() if key in LOOKED}\n"
        "after = look(locals())\nloss = 8\nstep.stand_ins.drop()\nfound.append((after, look(locals())))\n"
    )
    looked = "LOOKED = ('kept', 'zero', 'some', 'none', 'empty', 'full', 'notes', 'meter', 'loss', 'made', 'i')\n"
    text = looked + (f"def run():\n{indent(body, ' ')}\nrun()\n" if is_function else body)
    [(after, then)] = run_file(tmp_path / "script.py", text, Block())["found"]
    was = {"kept": 5, "zero": 0, "some": 2, "none": None, "empty": [], "full": [3], "notes": {"b": 2}}
    assert then == {**was, "meter": {"a": None}, "loss": 8}
    new = {
        "zero": 1,
        "none": 1,
        "empty": [1],
        "notes": {"a": 1, "b": 2},
        "meter": {"a": 1, "b": 1},
        "loss": 1,
        "made": 1,
    }
    assert plain(after) == {**was, **new}
    [(after, then)] = run_file(tmp_path / "sizes.py", text, Block((4,)), all_names=True)["found"]
    assert plain(after) == {**was, **new, "kept": 1, "some": 1}
    assert then == {**was, "meter": {"a": None}, "loss": 8}


def test_an_item_that_reading_would_make_is_not_made(tmp_path: Path) -> None:
    body = (
        "counts = defaultdict(float)\nwith step as x:\n interrupt(0)\n counts['a'] += 1\n"
        "found.append(dict(counts))\nstep.stand_ins.drop()\nfound.append(dict(counts))\n"
    )
    assert [plain(one) for one in run_file(tmp_path / "script.py", body, Block())["found"]] == [{"a": 1}, {}]


def plain(names: dict[str, Any]) -> dict[str, Any]:
    """Return values with 1 for each stand-in, whose comparisons are false."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(one) for one in value]
        if isinstance(value, dict):
            return {key: of(one) for key, one in value.items()}
        return int(float(value)) if isinstance(value, StandIn) else value

    return dict(of(names))


def test_a_block_that_is_not_interrupted_or_whose_source_is_not_known() -> None:
    """Nothing is set."""
    step = Block()
    exec("with step:\n interrupt(0)\n loss = 1\n", names := {"step": step, "interrupt": step.interrupt})
    assert "loss" not in names
    step.stand_ins.drop()


def test_attributes_with_setters_are_left_alone() -> None:
    """A gradient takes tensors only, and a property runs code of the script; a mask of a parameter is an entry."""

    class Meter:
        def __init__(self) -> None:
            self.mean = None

        @property
        def last(self) -> None:
            return None

        @last.setter
        def last(self, value: object) -> None:
            raise AssertionError(value)

    @dataclass(frozen=True)
    class Frozen:
        mean: None = None

    weight = torch.zeros(2, requires_grad=True)
    assert not any(_takes_any(*pair) for pair in ((weight, "grad"), (Meter(), "last"), (Frozen(), "mean")))
    assert all(_takes_any(*pair) for pair in ((weight, "mask"), (Meter(), "mean")))


def test_what_is_computed_with_one() -> None:
    value: Any = StandIn(1.0)
    assert isinstance(value.detach().cpu().numpy()[3].item(), StandIn)
    assert list(value.items()) == []
    assert isinstance(torch.argmax(value, dim=1), StandIn)
    with pytest.raises(AttributeError):
        value.__array_interface__  # noqa: B018


def run_file(path: Path, text: str, step: Block, *, all_names: bool = False) -> dict[str, Any]:
    """Run a script; return its names."""
    imports = (
        "import json, math, statistics\nfrom argparse import Namespace\nfrom collections import defaultdict, deque\n"
    )
    path.write_text(f"{imports}import numpy as np\nimport torch\n{text}")
    step.all_names = all_names
    names = {"step": step, "interrupt": step.interrupt, "found": [], "__name__": "script"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names
