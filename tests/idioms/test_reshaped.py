"""Scripts of the library in other shapes compute the same."""

import random
from pathlib import Path

import pytest

from tests.idioms import library
from tests.idioms.reshaped.functions import body_with_results
from tests.idioms.reshaped.loops import Shape
from tests.idioms.reshaped.places import in_dataclass
from tests.idioms.reshaped.reshape import SHAPES, with_shape
from tests.idioms.reshaped.ways import steps_kept, walrus
from tests.idioms.trial import run_variant, without_relight
from tests.idioms.verdict import Verdict, digests_in, judge


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_many_scripts_can_have_each_shape(shape: Shape) -> None:
    texts = [with_shape(library.path_of(name).read_text(), shape, random.Random(1)) for name in library.names()[::8]]
    assert len([text for text in texts if text]) > 10


@pytest.mark.all
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_scripts_in_a_shape_end_as_they_did(shape: Shape, tmp_path: Path) -> None:
    changed = {
        name: text
        for name in library.names()[5::12]
        if (text := with_shape(library.path_of(name).read_text(), shape, random.Random(name)))
    }
    chosen = sorted(changed)[:4]
    for name in chosen:
        path = tmp_path / f"{name}.py"
        path.write_text(changed[name])
        expected = digests_in(without_relight(name))
        assert expected, name
        assert digests_in(without_relight(str(path))) == expected, name


def test_a_script_in_other_shapes_computes_the_same_and_survives_a_failure(tmp_path: Path) -> None:
    expected = digests_in(without_relight("meters_after_block"))
    text = library.path_of("meters_after_block").read_text()
    for shape in (steps_kept, walrus, body_with_results, in_dataclass):
        text = with_shape(text, shape, random.Random(3))
        assert text, shape.__name__
    path = tmp_path / "meters_after_block.py"
    path.write_text(text)
    assert digests_in(without_relight(str(path))) == expected
    ending = run_variant("meters_after_block", path, ["kill rank 0 in FORWARD of step 3"])
    assert judge(ending, expected) == (Verdict.EQUAL, ""), ending.words


def test_a_loop_whose_code_is_in_no_file_is_refused_before_its_first_step(tmp_path: Path) -> None:
    path = tmp_path / "block_on_a_stack.py"
    path.write_text(f"exec(compile({library.path_of(path.stem).read_text()!r}, '<script>', 'exec'))\n")
    verdict, words = judge(run_variant(path.stem, path), {})
    assert verdict is Verdict.REFUSED
    assert "the code of this loop is in no file" in words
