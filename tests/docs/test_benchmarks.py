"""Each benchmark that writes a document is one that `python -m benchmarks` knows, with a place in the summary."""

from pathlib import Path

from benchmarks.__main__ import BENCHMARKS, EXTRA
from benchmarks.summary import ORDER, TITLES

FOLDER = Path(__file__).parents[2] / "benchmarks"
KNOWN = {benchmark.name: benchmark for benchmark in (*BENCHMARKS, *EXTRA)}
OF_ITS_OWN_KIND = "stop_collective"  # its document has another form, and the summary a section for it


def test_every_benchmark_is_registered() -> None:
    writers = {
        path.stem
        for path in FOLDER.glob("*.py")
        if "write_document(document" in path.read_text() and path.name != "documents.py"
    }
    assert len(writers) > 10
    assert not writers - {benchmark.module.split(".")[1] for benchmark in KNOWN.values()}


def test_every_benchmark_has_a_place_in_the_summary() -> None:
    assert set(ORDER) == set(TITLES) == set(KNOWN) - {OF_ITS_OWN_KIND}


def test_every_module_that_is_named_exists() -> None:
    for benchmark in KNOWN.values():
        path = FOLDER.joinpath(*benchmark.module.split(".")[1:])
        assert path.with_suffix(".py").is_file()
