"""Names that an interrupted block has not set, as code after the block reads them."""

import sys
from pathlib import Path
from textwrap import indent
from types import TracebackType
from typing import Any

import pytest
import torch

from relight.errors import StepInterrupted
from relight.training.worker.stand_ins import StandIn, StandIns


class Block:
    """A step whose block is interrupted: sets stand-ins at its end."""

    def __init__(self) -> None:
        self.stand_ins = StandIns()

    def __enter__(self) -> torch.Tensor:
        return torch.ones(4, 3)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, StepInterrupted):
            self.stand_ins.set(sys._getframe(1))
            return True
        return False


def interrupt() -> None:
    raise StepInterrupted("a failure elsewhere")


BLOCK = """
interrupt()
out, (aux, *_) = x * 2, (x, x)
loss = out.sum()
losses = {"a": loss}
with torch.no_grad() as held:
    if (n := len(out)) > 2:
        for index in range(n):
            seen = index
"""
LINES = (
    "total += loss.item() * x.size(0)",
    "meters.append(float(loss.detach().cpu()))",
    "print(f'{loss:.4f} {loss} {loss.item():>10.2e}')",
    "correct = (out.argmax(1) == x.argmax(1)).sum().item() / len(out)",
    "if not math.isfinite(loss): raise SystemExit(1)",
    "if torch.isnan(loss).any(): raise SystemExit(1)",
    "assert torch.isfinite(loss)",
    "if loss.isnan(): raise SystemExit(1)",
    "mean = torch.stack([loss, torch.ones(())]).mean().item()",
    "mean = torch.nn.functional.mse_loss(out, x).item()",
    "mean = torch.exp(loss), (out - x).abs(), out @ x.T, x + out",
    "mean = np.mean([loss, 2.0]), np.asarray(float(loss))",
    "meters.append({key: value.item() for key, value in losses.items()})",
    "best = min(total, loss.item()); rounded = round(float(loss), 3), int(loss), out[0, :2].tolist()",
    "text = json.dumps({'loss': loss, 'n': n, 'seen': seen})",
    "del loss",
)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("is_function", [True, False])
def test_code_after_the_block_runs(line: str, is_function: bool, tmp_path: Path) -> None:
    body = f"total, meters = 0.0, []\nwith step as x:\n{indent(BLOCK, ' ')}\n{line}\n"
    run_file(tmp_path, f"def run():\n{indent(body, ' ')}\nrun()\n" if is_function else body, Block())


@pytest.mark.parametrize("is_function", [True, False])
def test_names_that_have_a_value_keep_it_and_others_are_unset_again(is_function: bool, tmp_path: Path) -> None:
    body = (
        "kept = 5\nwith step as x:\n interrupt()\n kept, loss = 6, 7\n made = [i for i in x]\n"
        "after = {k: v for k, v in locals().items() if k in ('kept', 'loss', 'made', 'i')}\n"
        "loss = 8\nstep.stand_ins.drop()\nthen = {k: v for k, v in locals().items() if k in ('kept', 'loss', 'made')}\n"
        "found.append((after, then))\n"
    )
    names = run_file(tmp_path, f"def run():\n{indent(body, ' ')}\nrun()\n" if is_function else body, Block())
    assert names["found"] == [({"kept": 5, "loss": 1.0, "made": 1.0}, {"kept": 5, "loss": 8})]


def test_a_block_that_is_not_interrupted_or_whose_source_is_not_known() -> None:
    """Nothing is set."""
    step = Block()
    exec("with step:\n interrupt()\n loss = 1\n", names := {"step": step, "interrupt": interrupt})
    assert "loss" not in names
    step.stand_ins.drop()


def test_what_is_computed_with_one() -> None:
    value: Any = StandIn(1.0)
    assert isinstance(value.detach().cpu().numpy()[3].item(), StandIn)
    assert list(value.items()) == []
    assert isinstance(torch.argmax(value, dim=1), StandIn)
    with pytest.raises(AttributeError):
        value.__array_interface__  # noqa: B018


def run_file(directory: Path, text: str, step: Block) -> dict[str, Any]:
    """Run a script; return its names."""
    path = directory / "script.py"
    path.write_text("import json, math\nimport numpy as np\nimport torch\n" + text)
    names = {"step": step, "interrupt": interrupt, "found": [], "__name__": "script"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names
