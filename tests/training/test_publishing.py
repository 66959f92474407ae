"""Messages of a trainer that cannot publish, and those that it leaves out."""

from relight.training.publish.publishing import TAKEN_SECONDS, SocketTaken


def test_a_place_that_is_taken_for_a_moment_is_not_told() -> None:
    """A dying process holds its socket until its memory is freed."""
    taken = SocketTaken()
    assert not taken.lasts(100.0)
    assert not taken.lasts(100.0 + TAKEN_SECONDS)
    assert taken.lasts(100.1 + TAKEN_SECONDS)
    taken.is_over()
    assert not taken.lasts(200.0)
