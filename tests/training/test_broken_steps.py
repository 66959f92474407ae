"""A step that is given up: what its exception holds is let go, however that was raised."""

import threading
from collections.abc import Callable

import pytest

from relight.training.worker.broken_steps import drop_frames

DEADLINE_SECONDS = 20.0


def broken(number: int = 0) -> None:
    raise RuntimeError(f"connection {number} reset")


def plainly() -> None:
    broken()


def from_itself() -> None:
    try:
        broken()
    except RuntimeError as error:
        raise error from error


def in_a_circle() -> None:
    try:
        broken()
    except RuntimeError as first:
        second = ValueError("no loss")
        first.__cause__ = second
        raise second from first


def while_another_was_handled() -> None:
    try:
        broken(1)
    except RuntimeError:
        try:
            broken(2)
        except RuntimeError as error:
            raise ValueError("no loss") from error


def by_a_finally() -> None:
    try:
        broken()
    finally:
        raise NameError("loss")


def in_a_group() -> None:
    try:
        broken()
    except RuntimeError as error:
        raise ExceptionGroup("all", [error, ExceptionGroup("inner", [error, ValueError("no loss")])]) from None


@pytest.mark.parametrize(
    "raises", [plainly, from_itself, in_a_circle, while_another_was_handled, by_a_finally, in_a_group]
)
def test_no_frame_is_held(raises: Callable[[], None]) -> None:
    with pytest.raises(Exception) as caught:
        raises()
    error = caught.value
    everything = reached(error)
    assert any(one.__traceback__ is not None for one in everything)
    dropping = threading.Thread(target=drop_frames, args=(error,), daemon=True)
    dropping.start()
    dropping.join(DEADLINE_SECONDS)
    assert not dropping.is_alive()
    assert all(one.__traceback__ is None for one in everything)


def reached(error: BaseException | None, found: tuple[BaseException, ...] = ()) -> tuple[BaseException, ...]:
    """Return an exception and all that it names."""
    if error is None or any(one is error for one in found):
        return found
    found = (*found, error)
    for one in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        found = reached(one, found)
    return found
