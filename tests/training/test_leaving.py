"""A loop that is left by `break`, and one that is left by an exception: what closes its iterator tells them apart."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relight.training.carried.code.leaving import is_left_by_break


class Steps:
    """An iterator that notes how it was left."""

    def __init__(self) -> None:
        self.by_break: bool | None = None

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(5)
        except GeneratorExit:
            self.by_break = is_left_by_break(sys._getframe().f_back)
            raise


def bar(steps: Any) -> Iterator[int]:
    """Pass steps on, as progress bars do."""
    try:
        for step in steps:  # noqa: UP028
            yield step
    finally:
        sys.getsizeof(0)


def delegating(steps: Any) -> Iterator[int]:
    yield from steps


AROUND: dict[str, Callable[[Any], Any]] = {
    "nothing": iter,
    "enumerate": enumerate,
    "zip": lambda steps: zip(steps, range(9), strict=False),
    "a bar": bar,
    "yield from": delegating,
    "two bars": lambda steps: bar(delegating(steps)),
}


def leave_by_break(make: Callable[[], Any]) -> None:
    for _ in make():
        with contextlib.nullcontext():
            break


def leave_by_return(make: Callable[[], Any]) -> Any:
    for step in make():
        return step
    return None


def leave_by_break_in_finally(make: Callable[[], Any]) -> None:
    for _ in make():
        try:
            break
        finally:
            sys.getsizeof(0)


def leave_by_exception(make: Callable[[], Any]) -> None:
    with contextlib.suppress(ValueError):
        for _ in make():
            int("none")


def leave_by_exit(make: Callable[[], Any]) -> None:
    try:
        for _ in make():
            sys.exit(0)
    except SystemExit:
        return


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("leave", [leave_by_break, leave_by_return, leave_by_break_in_finally])
def test_break_and_return(leave: Callable[[Any], Any], around: str) -> None:
    steps = Steps()
    leave(lambda: AROUND[around](iter(steps)))
    assert steps.by_break is True


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("leave", [leave_by_exception, leave_by_exit])
def test_exceptions(leave: Callable[[Any], Any], around: str) -> None:
    steps = Steps()
    leave(lambda: AROUND[around](iter(steps)))
    assert steps.by_break is False


def test_an_iterator_that_is_held_elsewhere() -> None:
    """Code after the loop has run by the time it is closed."""
    steps = Steps()
    held = [iter(steps)]
    leave_by_break(lambda: held[0])
    assert steps.by_break is None
    held.clear()
    assert steps.by_break is False
