"""Objects that can be neither undone nor carried: told after a recovery, and where an early step is computed twice."""

from pathlib import Path

import pytest

from tests.training.carried_loop import Loop, run_script

SCRIPT = """
import bz2, contextlib, functools, hashlib, itertools, lzma, multiprocessing, os, pathlib, queue, socket, sqlite3
import subprocess, zlib
import torch

class Thing:
    def __init__(self):
        self.value = 0

@functools.lru_cache(maxsize=2)
def few(name):
    return [name]

@functools.cache
def kept(name):
    return Thing()

@functools.cache
def table(size):
    return torch.zeros(size)

def file(contents=bytes(200)):
    path = pathlib.Path(__file__).with_name("held")
    path.write_bytes(contents)
    return path

def database():
    found = sqlite3.connect(file(b""), isolation_level=None)
    found.execute("CREATE TABLE seen (value INT)")
    return found

def run():
    made = MAKE
    def act(step):
        CHANGE
    acts = [act]
    for step in steps():
        with step as value:
            if step.number in (FIRST, 30):
                eval("acts[0](1)", {"acts": acts})
            step.end()
result = run()
"""
MADE = {  # made, changed, and a word of the message
    "queue": ("queue.Queue()", "made.put(1)", "made"),
    "queue in order": ("queue.PriorityQueue()", "made.put(1)", "made"),
    "simple queue": ("queue.SimpleQueue()", "made.put(1)", "made"),
    "digest": ("hashlib.sha256()", "made.update(b'1')", "made"),
    "digest of any length": ("hashlib.shake_128()", "made.update(b'1')", "made"),
    "compressor": ("zlib.compressobj()", "made.compress(b'1')", "made"),
    "decompressor": ("zlib.decompressobj()", "made.decompress(zlib.compress(b'1'))", "made"),
    "compressor that shows nothing": ("bz2.BZ2Compressor()", "made.compress(b'1')", "made"),
    "decompressor that shows nothing": ("lzma.LZMADecompressor()", "made.decompress(b'')", "made"),
    "contexts": ("contextlib.ExitStack()", "made.callback(print)", "made"),
    "file": ("open(file())", "made.read(1)", "made"),
    "file of bytes": ("open(file(), 'rb')", "made.read(1)", "made"),
    "file by its number": ("os.open(file(), os.O_RDONLY)", "os.read(made, 1)", "held"),
    "database in a file": ("database()", "made.execute('INSERT INTO seen SELECT 1')", "made"),
    "result of a cached function": ("few('a') and None", "few('a').append(1)", "few"),
    "object of a cached function": ("kept('a') and None", "setattr(kept('a'), 'value', 1)", "kept"),
    "tensor of a cached function": ("table(3).size() and None", "table(3).add_(1)", "table"),
    "pipe to another process": ("multiprocessing.Pipe()", "made[1].send(1), made[0].recv()", "multiprocessing"),
    "queue of processes": ("multiprocessing.SimpleQueue()", "made.put(1), made.get()", "multiprocessing"),
    "socket": ("socket.socketpair()", "made[1].send(b'1'), made[0].recv(1)", "made"),
    "another program": ("subprocess.Popen(['true'], stdout=-1)", "made.stdout.read()", "made"),
    "inside of an object": ("[Thing(), queue.Queue()]", "made[1].put(1)", "made"),
}
BLIND = (
    "decompressor",
    "compressor that shows nothing",
    "decompressor that shows nothing",
    "socket",
    "another program",
)


def script(made: str, change: str, first: int) -> str:
    return SCRIPT.replace("MAKE", made).replace("CHANGE", change).replace("FIRST", str(first))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("first", [1, 5])
def test_a_change_is_told_at_a_recovery_and_ends_no_job(name: str, first: int, tmp_path: Path) -> None:
    made, change, word = MADE[name]
    loop = Loop(until=8, fails_at=first)
    run_script(script(made, change, first), loop, tmp_path)
    assert word in str(loop.doubt)
    assert "neither undone" in str(loop.doubt)
    assert all("neither undone" in (why or "neither undone") for why in loop.rolled_back)
    assert any(loop.undone)  # the step that is computed twice would have told it as well


@pytest.mark.parametrize("name", [name for name in MADE if name not in BLIND])
def test_what_does_not_change_is_not_told(name: str, tmp_path: Path) -> None:
    made, _, _ = MADE[name]
    loop = Loop(until=8, fails_at=5)
    run_script(script(made, "pass", 5), loop, tmp_path)
    assert loop.doubt is None
    assert not any(loop.undone)


@pytest.mark.parametrize("change", ["few('b')", "kept('b')", "table(4)", "few('b'), few('c'), few('d')"])
def test_results_that_are_only_computed_late_are_not_told(change: str, tmp_path: Path) -> None:
    loop = Loop(until=8, fails_at=5)
    run_script(script("kept('a') and None", change, 5), loop, tmp_path)
    assert loop.doubt is None


def test_contexts_that_are_closed_are_not_told(tmp_path: Path) -> None:
    opened = "(lambda stack: (stack.callback(int), stack)[1])(contextlib.ExitStack())"
    loop = Loop(until=8, fails_at=5)
    run_script(script(opened, "made.close()", 5), loop, tmp_path)
    assert loop.doubt is None
    assert not any(loop.undone)


def test_what_an_undone_step_has_cached_is_computed_anew(tmp_path: Path) -> None:
    source = script("kept('a')", "setattr(kept('b'), 'value', kept('b').value + 1)", 5)
    assert (
        run_script(source.replace("result = run()", "run()\nresult = kept('b').value"), Loop(fails_at=5), tmp_path) == 1
    )


@pytest.mark.parametrize(("name", "word"), [("queue", "made"), ("pipe to another process", "multiprocessing")])
def test_what_the_script_ignores_is_not_told(name: str, word: str, tmp_path: Path) -> None:
    loop = Loop(until=8, fails_at=5)
    source = script(*MADE[name][:2], 5).replace("    acts =", f"    carry(ignore=({word!r},))\n    acts =")
    run_script(source, loop, tmp_path)
    assert loop.doubt is None


LIBRARYS = """
import networkx
def run(graph, count):
    for step in steps():
        with step as value:
            if CONDITION:
                graph.add_edge(step.number, step.number + 1)
            count = count + USE
            if count > 1e9:
                raise ValueError
            step.end()
    return count
result = run(networkx.Graph(), 0)
"""


@pytest.mark.parametrize(
    ("condition", "use", "is_told"),
    [
        ("True", "len(graph)", True),
        ("step.number >= 4", "len(graph)", True),
        ("step.number >= 4", "len(graph.edges)", True),
        ("step.number >= 4", "max(networkx.degree(graph), default=(0, 0))[1]", True),
        ("step.number >= 4", "1", False),  # no step depends on it
        ("step.number == 0", "len(graph)", False),  # made when it is first used, perhaps
        ("step.number >= 6", "len(graph)", False),
    ],
)
def test_objects_of_libraries_that_steps_use_are_told_once_they_change(
    condition: str, use: str, is_told: bool, tmp_path: Path
) -> None:
    """Their classes may keep state anywhere; a graph, an environment."""
    loop = Loop(until=8, fails_at=5)
    run_script(LIBRARYS.replace("CONDITION", condition).replace("USE", use), loop, tmp_path)
    assert ("graph" in (loop.doubt or "")) == is_told
    assert any(loop.undone) == is_told  # the step that is computed twice would have told it as well


def test_functions_in_objects_of_libraries_count_by_their_identity(tmp_path: Path) -> None:
    source = LIBRARYS.replace("CONDITION", "True").replace("USE", "len(graph)")
    loop = Loop(until=8, fails_at=5)
    run_script(source.replace("networkx.Graph()", "networkx.Graph(act=lambda: 1)"), loop, tmp_path)
    assert "graph" in (loop.doubt or "")
