"""Scripts of the library in other shapes compute the same."""

import random
from pathlib import Path

import pytest

from tests.idioms import library
from tests.idioms.reshaped.reshape import reshaped, with_shape
from tests.idioms.reshaped.shapes import PLACES, WAYS, Shape
from tests.idioms.trial import run_variant, without_relight
from tests.idioms.verdict import Verdict, digests_in, judge


@pytest.mark.parametrize("shape", [*PLACES, *WAYS], ids=lambda shape: shape.__name__)
def test_many_scripts_can_have_each_shape(shape: Shape) -> None:
    texts = [with_shape(library.path_of(name).read_text(), shape, random.Random(1)) for name in library.names()[::8]]
    assert len([text for text in texts if text]) > 12


def test_a_shape_changes_nothing_that_is_computed_and_survives_failures(tmp_path: Path) -> None:
    expected = digests_in(without_relight("meters_after_block"))
    path = tmp_path / "meters_after_block.py"
    shapes: list[str] = []
    for number in (3, 5, 8):
        text, shapes = reshaped(library.path_of("meters_after_block"), random.Random(number))
        path.write_text(text)
        assert digests_in(without_relight(str(path))) == expected, shapes
    ending = run_variant("meters_after_block", path, ["kill rank 0 in FORWARD of step 3"])
    assert judge(ending, expected) == (Verdict.EQUAL, ""), (shapes, ending.words)
