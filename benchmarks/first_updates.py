"""The first updates of engines beside later ones: how long until the memory of their second copies is there.

The weights of a model go several times to engines that have just started, at once after they are connected and with a
pause before each update, as training makes between two of them. Each engine is a process with a `Receiver(model=...)`.

Run by ``python -m benchmarks.first_updates``; ``python -m benchmarks.first_updates --one ENGINES PAUSE`` measures one
case and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.documents import (
    RESULTS,
    Document,
    Progress,
    command,
    measure_apart,
    read_document,
    start_document,
    write_document,
)
from benchmarks.figures import markdown_table

MIB = 940
UPDATES = 4
CASES = ((1, 0.0), (3, 0.0), (1, 2.0), (3, 2.0))  # engines, seconds before each update
DEADLINE_S = 300.0


def measure(engines: int, pause_s: float, mib: int, updates: int) -> dict[str, Any]:
    """Seconds of each update, from its start until every engine answers with it."""
    import torch

    import relight
    from benchmarks.weights.shapes import dense

    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as place:
        pipes = [spawn.Pipe() for _ in range(engines)]
        processes = [spawn.Process(target=_serve, args=(place, mib, far), daemon=True) for _, far in pipes]
        tensors = dense(mib)
        source = relight.LentWeights(tensors)
        seconds = []
        try:
            with relight.Publisher(place, stall_timeout_seconds=DEADLINE_S) as publisher:
                for process in processes:
                    process.start()
                if not publisher.wait_for_engines(engines, DEADLINE_S):
                    raise RuntimeError("not every engine has come")
                for version in range(updates):
                    time.sleep(pause_s)
                    next(iter(tensors.values())).view(torch.int16).view(-1)[:8] += 1
                    started = time.monotonic()
                    result = publisher.publish(source, version=version)
                    seconds.append(time.monotonic() - started)
                    if len(result.engines) != engines:
                        raise RuntimeError(f"not every engine took it: {result.dropped}")
                expected = relight.digest_weights(tensors)
                for near, _ in pipes:
                    near.send(None)
                    if near.recv() != expected:
                        raise RuntimeError("the weights did not arrive")
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {"engines": engines, "pause_s": pause_s, "total_bytes": source.manifest.total_bytes, "seconds": seconds}


def _serve(place: str, mib: int, link: Connection) -> None:
    """An engine: it keeps its weights new until it is asked for their digest."""
    import torch

    import relight
    from benchmarks.weights.shapes import dense

    torch.set_num_threads(1)
    with relight.Receiver(place, model=dense(mib)) as receiver:
        link.recv()
        link.send(receiver.digest())
        link.poll(DEADLINE_S)


def render(document: Document) -> str:
    """Markdown."""
    updates = document["settings"]["updates"]
    cases = [(name, case) for name in ("before", "cases") for case in document.get(name, [])]
    rows = [
        [
            document["before_commit"] if name == "before" else document["commit"],
            str(case["engines"]),
            f"{case['pause_s']:g} s",
            f"{case['total_bytes'] / 2**30:.2f} GiB",
            *(f"{seconds:.2f} s" for seconds in case["seconds"]),
        ]
        for name, case in cases
    ]
    text = (
        "Engines that have just started get the weights several times in a row; `pause`: before each update. Every "
        "engine keeps a second copy, and the system has yet to find the memory for it when the first update comes; for "
        "the copy that the second update goes to as well."
    )
    header = ["commit", "engines", "pause", "weights", *(f"update {number + 1}" for number in range(updates))]
    return f"{text}\n\n{markdown_table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="The first updates of engines beside later ones")
    parser.add_argument("--one", nargs=2, metavar=("ENGINES", "PAUSE"), help="measure this case alone, and print JSON")
    parser.add_argument("--mib", type=int, default=MIB)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--before", type=Path, help="document of an earlier commit, to be shown beside")
    parser.add_argument("--output", type=Path, default=RESULTS / "first_updates.json")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(int(options.one[0]), float(options.one[1]), options.mib, options.updates)))
        return
    document = start_document("first_updates", mib=options.mib, updates=options.updates)
    progress = Progress(len(CASES))
    document["cases"] = []
    if options.before:
        earlier = read_document(options.before)
        document["before"], document["before_commit"] = earlier["cases"], earlier["commit"]
    for engines, pause_s in CASES:
        words = ["--one", str(engines), str(pause_s), "--mib", str(options.mib), "--updates", str(options.updates)]
        case = measure_apart("first_updates", *words)
        document["cases"].append(case)
        told = ", ".join(f"{seconds:.2f}" for seconds in case["seconds"])
        progress.done(f"{engines} engines, {pause_s:g} s: {told} s")
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
