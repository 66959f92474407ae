"""Scripts that train twice in a process, told from those that do not, by their code and before they train."""

from pathlib import Path

import pytest

from relight.integrations.trainers.second import comes_again


class Trainer:
    """Asks, as relight's Trainers do."""

    found: str | None = None

    def train(self) -> None:
        """Train."""
        Trainer.found = comes_again("train", Trainer)
        raise StopIteration


class Model:
    """Has a method of that name, too."""

    def train(self) -> None:
        """Do nothing."""


TWICE = {
    "one after the other": ("a = Trainer()\na.train()\nb = Trainer()\nb.train()\n", 4),
    "the same again": ("a = Trainer()\na.train()\na.lr = 1\na.train()\n", 4),
    "folds": ("for fold in range(5):\n    a = Trainer()\n    a.train()\n", 1),
    "so many folds": ("folds = 2\nfor fold in range(folds):\n    a = Trainer()\n    a.train()\n", 2),
    "whatever an iterator gives": ("for fold in iter([1]):\n    a = Trainer()\n    a.train()\n", 1),
    "a function twice": ("def stage(x):\n    Trainer().train()\nstage(1)\nstage(2)\n", 4),
    "in functions": (
        "def train(x):\n    a = Trainer()\n    a.train()\ndef main():\n    train(1)\n    y = train(2)\nmain()\n", 6,
    ),
    "in one line": ("a = Trainer(); a.train(); a.train()\n", 1),
    "in a with": ("import contextlib\na = Trainer()\na.train()\nwith contextlib.nullcontext():\n    a.train()\n", 4),
}  # fmt: skip
ONCE = {
    "once": "a = Trainer()\na.train()\nModel().train()\n",
    "a module's mode": "a, model = Trainer(), Model()\na.train()\nmodel.train()\n",
    "retries": "while True:\n    a = Trainer()\n    a.train()\n    break\n",
    "one of several": "for x in range(3):\n    a = Trainer()\n    a.train()\n    break\n",
    "branches": "a = Trainer()\nx = 1\nif x:\n    a.train()\nelse:\n    a.train()\n",
    "perhaps": "a = Trainer()\nx = 1\na.train()\nif x == 2:\n    a.train()\n",
    "an early return": (
        "def main():\n    a = Trainer()\n    a.train()\n    if a:\n        return\n    a.train()\nmain()\n"
    ),
    "one fold": "folds = 1\nfor fold in range(folds):\n    a = Trainer()\n    a.train()\n",
    "one seed": "seeds = [7]\nfor seed in seeds:\n    a = Trainer()\n    a.train()\n",
    "a turn of a loop": "for x in (1, 2):\n    a = Trainer()\n    if x == 1:\n        a.train()\n",
    "a function that decides": (
        "def main(x):\n    if x == 1:\n        Trainer().train()\nfor x in (1, 2):\n    main(x)\n"
    ),
    "in one line": "a = Trainer(); a.train(); Model().train()\n",
    "defined only": "a = Trainer()\ndef again():\n    a.train()\na.train()\n",
}


def ask(path: Path, source: str) -> str | None:
    """Run a script until it trains."""
    path.write_text(source)
    with pytest.raises(StopIteration):
        exec(compile(source, str(path), "exec"), {"Trainer": Trainer, "Model": Model, "__name__": "script"})
    return Trainer.found


@pytest.mark.parametrize("name", TWICE)
def test_a_script_that_trains_twice(name: str, tmp_path: Path) -> None:
    source, line = TWICE[name]
    path = tmp_path / "script.py"
    assert ask(path, source) == f"{path}:{line}"


@pytest.mark.parametrize("name", ONCE)
def test_a_script_that_trains_once_as_far_as_is_certain(name: str, tmp_path: Path) -> None:
    assert ask(tmp_path / "script.py", ONCE[name]) is None
