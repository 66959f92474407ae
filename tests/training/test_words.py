"""An exception in one line, whatever class a script has made of it."""

import pytest

from relight.words import described, first_line


class Silent(Exception):
    """Cannot be turned into text: it was made without the argument that its words are made of."""

    def __str__(self) -> str:
        return str(self.args[3])


@pytest.mark.parametrize(
    ("error", "line", "whole"),
    [
        (ValueError("no data"), "no data", "ValueError: no data"),
        (ValueError("no data\nat all"), "no data", "ValueError: no data"),
        (ValueError(), "ValueError", "ValueError"),
        (ValueError("\nlate"), "ValueError", "ValueError"),
        (KeyError("x"), "'x'", "KeyError: 'x'"),
        (Silent(), "Silent", "Silent"),
    ],
    ids=repr,
)
def test_one_line(error: Exception, line: str, whole: str) -> None:
    assert (first_line(error), described(error)) == (line, whole)
