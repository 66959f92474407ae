"""Fresh weights in four engines on one host: relight beside what people do otherwise, and beside what memory allows.

The same processes and tensors, in turns (`benchmarks.weights.publishing`). Then one thing at a time is changed: the
size of the weights, the number of engines, the size of a bucket. Last, what the cost model predicts from the stages'
times with one engine, beside what four engines take.

Run by ``python -m benchmarks.publish``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from benchmarks.documents import (
    RESULTS,
    Document,
    Progress,
    Verdict,
    add_verdicts,
    command,
    measure_apart,
    start_document,
    verdict_rows,
    write_document,
)
from benchmarks.figures import markdown_table, ways_table
from relight.transfer.plan.cost import Costs, predict
from relight.transfer.plan.manifest import Entry, make_manifest
from relight.transfer.plan.plan import plan_buckets
from relight.transfer.plan.schedule import Form, make_schedule

MODULE = "weights.publishing"
MIB = 2**20
ENGINES = 4
BUCKET_MIB = 32
NAMES = {
    "relight": "relight, two-stage: engines read what the sender lends",
    "relight-serial": "relight, serial, lent too",
    "relight-copied": "relight, two-stage, copied into shared buffers",
    "per-tensor": "`dist.broadcast` per tensor (gloo), `load_state_dict`",
    "coalesced": "256 MiB buckets over gloo, copied to their places",
    "pipeline": "double-buffered buckets over gloo (the design of checkpoint-engine, on CPU buffers)",
    "limit": "every engine copies as many bytes in its own memory: the limit",
    "limit-with-source": "the same, and the sender copies as many too, as into a shared buffer",
    "unverified": "relight, two-stage, lent, with no digest taken anywhere",
}
TARGETS = {"per-tensor": 1 / 5, "coalesced": 1 / 2, "pipeline": 1.0, "limit": 1.3}
SIZES_MIB = (64, 256, 1024, 4096)
RECEIVERS = (1, 2, 4, 8)
BUCKETS_MIB = (1, 2, 4, 8, 16, 32, 64)
CURVE_MIB = 512
CORES = os.cpu_count() or 1


def run(rounds: int, mib: int, *, curves: bool) -> Document:
    """Everything; a part that fails is named, and the rest goes on."""
    document = start_document("publish", rounds=rounds, mib=mib, engines=ENGINES, bucket_mib=BUCKET_MIB)
    parts: list[tuple[str, str, dict[str, Any]]] = [
        ("models", model, {"model": model, "mib": mib, "rounds": rounds}) for model in ("dense", "mixture")
    ]
    ours = {"ways": ["relight", "relight-serial"]}
    if curves:
        # All engines together hold two copies each: the largest size goes to one engine.
        parts += [
            ("sizes", str(size), {"mib": size, "receivers": 1 if size > 1024 else ENGINES} | ours) for size in SIZES_MIB
        ]
        parts += [("receivers", str(n), {"mib": CURVE_MIB, "receivers": n} | ours) for n in RECEIVERS]
        parts += [("buckets", str(n), {"mib": CURVE_MIB, "bucket-bytes": n * MIB} | ours) for n in BUCKETS_MIB]
    parts.append(("alone", "dense", {"mib": CURVE_MIB, "receivers": 1} | ours))
    progress = Progress(len(parts))
    document["not_measured"] = []
    for group, key, options in parts:
        try:
            figures = measure_apart(MODULE, *_arguments(options))
        except Exception as error:
            document["not_measured"].append(f"{group} {key}: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        document.setdefault(group, {})[key] = figures
        progress.done(f"{group} {key}: {figures['median_s']['relight']:.3f} s")
    document["prediction"] = _prediction(document)
    dense = document.get("models", {}).get("dense")
    if dense is not None:
        document["headline"] = _headline(dense)
    add_verdicts(document, _verdicts(document))
    return document


def _arguments(options: dict[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def _verdicts(document: Document) -> list[Verdict]:
    found = []
    for model, figures in document.get("models", {}).items():
        medians = figures["median_s"]
        for way, target in TARGETS.items():
            if way in medians:
                ratio = medians["relight"] / medians[way]
                found.append(Verdict(f"publish, {model}: time over {way}", ratio, target, "ratio"))
    for form, figures in document["prediction"].items():
        off = abs(figures["predicted_s"] / figures["measured_s"] - 1) * 100
        found.append(Verdict(f"predicted time of the {form} form, off by", off, 20.0, "%"))
    return found


def _prediction(document: Document) -> dict[str, Any]:
    """From the stages of one engine, and of as many as there are cores, to four engines' time."""
    alone = document.get("alone", {}).get("dense")
    full = document.get("receivers", {}).get(str(ENGINES))
    if alone is None or full is None:
        return {}
    stage = alone["stages"]["relight-serial"]
    crowded = document["receivers"].get(str(CORES), alone)["stages"]["relight-serial"]
    crowding = max(1.0, crowded["load_s"] / stage["load_s"])
    buckets = plan_buckets(make_manifest([Entry("all", "uint8", (alone["total_bytes"],))]), BUCKET_MIB * MIB)
    # The last bucket is not full: counted as one, it would hide what words between the processes cost.
    spent = alone["total_bytes"] / (BUCKET_MIB * MIB) * (stage["write_s"] + stage["load_s"])
    rest = max(0.0, alone["median_s"]["relight-serial"] - spent) / (2 * len(buckets))
    costs = Costs(
        h2d_seconds=0.0,
        broadcast_seconds=stage["write_s"],
        reload_seconds=stage["load_s"],
        engines=ENGINES,
        cores=CORES,
        crowding=crowding,
        operation_seconds=rest,
        bucket_bytes=BUCKET_MIB * MIB,
    )
    found = {}
    for form, way in ((Form.SERIAL, "relight-serial"), (Form.TWO_STAGE, "relight")):
        schedule = make_schedule(form, devices=1, buckets=len(buckets), from_host=True)
        found[form.value] = {
            "predicted_s": predict(schedule, buckets, costs),
            "measured_s": full["median_s"][way],
            "write_s": stage["write_s"],
            "load_s": stage["load_s"],
            "operation_s": rest,
            "crowding": crowding,
        }
    return found


def _headline(figures: dict[str, Any]) -> str:
    medians = figures["median_s"]
    gib = figures["total_bytes"] / 2**30
    others = ", ".join(f"{way} {medians[way]:.2f} s" for way in TARGETS if way in medians)
    return f"{gib:.2f} GiB into {ENGINES} engines in {medians['relight']:.2f} s; {others}."


def render(document: Document) -> str:
    """Markdown."""
    parts = [
        "One sender, engines on the same host; from the sender's start until the last engine has the weights in its "
        "own parameters, every bucket verified (relight) or not (the others). Medians; the first round does not count. "
        "Staged: each engine keeps a second copy of the weights, and exchanges the two at the end."
    ]
    for model, figures in document.get("models", {}).items():
        parts += [
            f"## {model}: {figures['tensors']} tensors, {figures['total_bytes'] / MIB:.0f} MiB",
            ways_table(NAMES, figures, "GiB/s for each engine"),
        ]
        if "median_cpu_s" in figures:
            parts += [f"### {model}: where the time goes", _spent(figures)]
    parts.append(markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)))
    for group, what in (("sizes", "MiB of weights"), ("receivers", "engines"), ("buckets", "MiB in a bucket")):
        if group in document:
            parts += [f"## Against {what}", _curve(document[group], what)]
    if document["prediction"]:
        parts += ["## What the cost model says", _predicted(document["prediction"])]
    return "\n\n".join([*parts, *(f"Not measured: {text}" for text in document["not_measured"])])


def _spent(figures: dict[str, Any]) -> str:
    """The work of relight beyond the copies of the limit, one thing after the other."""
    steps = ("limit", "limit-with-source", "unverified", "relight", "relight-copied")
    cpu = figures["median_cpu_s"]
    rows = [
        [NAMES[way], f"{cpu[way]:.3f} s", f"{cpu[way] / cpu['limit']:.2f}", f"{figures['median_s'][way]:.3f} s"]
        for way in steps
        if way in cpu
    ]
    text = "Processor time of all processes together, which other programs on the machine change less than the clock's:"
    return f"{text}\n\n{markdown_table(['way', 'processor time', 'times the limit', 'time'], rows)}"


def _curve(group: dict[str, Any], what: str) -> str:
    rows = [
        [
            key,
            str(figures["options"]["receivers"]),
            f"{figures['median_s']['relight']:.3f} s",
            f"{figures['median_s']['relight-serial']:.3f} s",
            f"{figures['total_bytes'] * figures['options']['receivers'] / figures['median_s']['relight'] / 2**30:.2f}",
            f"{figures['stages']['relight']['written_beside_loads'] * 100:.0f} %",
        ]
        for key, figures in group.items()
    ]
    header = [what, "engines", "two-stage", "serial", "GiB/s, all engines together", "writing beside loading"]
    return markdown_table(header, rows)


def _predicted(prediction: dict[str, Any]) -> str:
    rows = [
        [form, f"{f['predicted_s']:.3f} s", f"{f['measured_s']:.3f} s", f"{f['predicted_s'] / f['measured_s']:.2f}"]
        for form, f in prediction.items()
    ]
    first = next(iter(prediction.values()))
    text = (
        f"From one engine alone: {first['write_s'] * 1e3:.2f} ms to write a bucket, {first['load_s'] * 1e3:.2f} ms to "
        f"load it, {first['operation_s'] * 1e6:.0f} us for each operation. With an engine on each of the {CORES} cores "
        f"a load takes {first['crowding']:.2f} times as long. For {ENGINES} engines:"
    )
    return f"{text}\n\n{markdown_table(['form', 'predicted', 'measured', 'ratio'], rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Publishing weights to engines on one host")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--no-curves", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "publish.json")
    options = parser.parse_args()
    write_document(run(options.rounds, options.mib, curves=not options.no_curves), render, options.output)


if __name__ == "__main__":
    command(main)
