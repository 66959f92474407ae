"""Files that belong to the script, also if its package is installed."""

import ast
import contextlib
import gc
import sys
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from relight.script_files import adopt_caller, is_script_file, is_script_module, is_user_type
from relight.training.carried.code.misuse import loops_around
from relight.training.state.values.kinds import kind_of
from tests.training.carried_scripts import compose, judge


def test_libraries_are_not_the_script_s() -> None:
    assert is_script_file(__file__)
    assert not is_script_file(ast.__file__)
    assert not is_script_file(pytest.__file__)
    assert not is_script_file(sys.modules[loops_around.__module__].__file__ or "")
    assert not is_script_file("<string>")


def test_modules() -> None:
    assert is_script_module("__main__")
    assert is_script_module(__name__)
    assert not is_script_module("torch.nn")
    assert not is_script_module("ast")
    assert not is_script_module("relight.training")


def test_classes_that_a_step_makes_are_not_kept_alive() -> None:
    """Nor is what their methods close over: the outputs of each step, say."""

    def step() -> weakref.ref[type]:
        class Made:
            def see(self) -> str:
                return word

        word = "output"
        assert is_user_type(Made)
        assert kind_of(Made()) == "object"
        return weakref.ref(Made)

    made = [step(), step()]
    gc.collect()
    assert [one() for one in made] == [None, None]


def frame_in(path: Path) -> FrameType:
    """The frame of a function that a file defines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("import sys\ndef train():\n    return sys._getframe()\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    frame: FrameType = names["train"]()
    return frame


@pytest.mark.parametrize("home", ["lib/python3.11/site-packages", "lib/python3/dist-packages"])
def test_the_installed_package_that_calls_relight_is_the_script_s(home: str, tmp_path: Path) -> None:
    packages = tmp_path / home
    for package in ("acme", "acme_other"):
        (packages / package / "inner").mkdir(parents=True)
        (packages / package / "__init__.py").touch()
    inside = packages / "acme/inner/data.py"
    other = packages / "acme_other/train.py"
    assert not is_script_file(str(inside))
    adopt_caller(frame_in(packages / "acme/train.py"))
    assert is_script_file(str(inside))
    assert not is_script_file(str(other))


def test_a_package_in_a_namespace(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    for package in ("vision", "speech"):
        (packages / "acme_space" / package).mkdir(parents=True)
        (packages / "acme_space" / package / "__init__.py").touch()
    adopt_caller(frame_in(packages / "acme_space/vision/train.py"))
    assert is_script_file(str(packages / "acme_space/vision/deep/data.py"))
    assert not is_script_file(str(packages / "acme_space/speech/data.py"))


def test_an_installed_module_that_is_one_file(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    adopt_caller(frame_in(packages / "acme_train.py"))
    assert is_script_file(str(packages / "acme_train.py"))
    assert not is_script_file(str(packages / "acme_train_other.py"))


def test_the_package_that_has_a_trainer_train_is_the_script_s(tmp_path: Path) -> None:
    """Between it and relight lie the framework, and wrappers of Python's."""
    packages = tmp_path / "site-packages"
    names: dict[str, Any] = {"adopt": lambda: adopt_caller(sys._getframe(1)), "wraps": contextlib.ContextDecorator}
    for name, code in (
        ("transformers", "class Context(wraps):\n __enter__ = lambda self: None\n __exit__ = lambda *_: None"),
        ("transformers", "@Context()\ndef loop(): adopt()"),
        ("acme_tuning", "def train(): loop()"),
    ):
        (packages / name).mkdir(parents=True, exist_ok=True)
        (packages / name / "__init__.py").touch()
        exec(compile(code, str(packages / name / "trainer.py"), "exec"), names)
    names["train"]()
    assert is_script_file(str(packages / "acme_tuning/data.py"))
    assert not is_script_file(str(packages / "transformers/trainer.py"))


def test_integrations_of_relight_are_not_adopted() -> None:
    names: dict[str, Any] = {}
    file = sys.modules[adopt_caller.__module__].__file__ or ""
    exec(compile("import sys\nframe = sys._getframe()", file, "exec"), names)
    adopt_caller(names["frame"])
    assert not is_script_file(file)


@pytest.mark.parametrize("seed", range(12))
def test_state_of_installed_scripts_is_found(seed: int, tmp_path: Path) -> None:
    home = tmp_path / "site-packages" / f"acme_{seed}"
    home.mkdir(parents=True)
    installed, plain = (judge(compose(seed), seed, directory).partition(":")[0] for directory in (home, tmp_path))
    assert installed == plain
