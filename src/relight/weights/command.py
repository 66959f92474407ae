"""`relight weights ...`: what an update of weights would take, and how it would go. No torch.

A further subcommand is a parser beside `_add_plan`, listed in `add_commands`.
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from relight.errors import UsageError
from relight.flags import add_options, read_options
from relight.weights import publish, relay
from relight.weights.options import PlanOptions, read_size

if TYPE_CHECKING:
    from rich.console import Console

    from relight.transfer.plan.cost import Choice, Costs, Span
    from relight.transfer.plan.manifest import Manifest
    from relight.transfer.plan.plan import Bucket
    from relight.transfer.plan.schedule import Schedule

MAX_BUCKETS = 100_000  # a schedule of more takes longer to plan than most updates to run
_COPIED_BYTES = 32 * 2**20
_STAGES = ("h2d", "broadcast", "reload")
_PLAN_EXAMPLES = """\
examples:
  relight weights plan model.safetensors --devices 4
  relight weights plan checkpoints/llama/ --devices 8 --bucket-bytes 64MiB --form two-stage
  relight weights plan --model "dense:layers=32,hidden=4096,ffn=14336,vocab=128256,kv=1024,dtype=bfloat16"
  relight weights plan --model "moe:layers=24,hidden=2048,ffn=1408,vocab=151936,experts=60" --devices 4 \\
      --h2d-seconds-per-gib 0.02 --broadcast-seconds-per-gib 0.005 --reload-seconds-per-gib 0.002
  relight weights plan model.safetensors --from-host --json

docs/WEIGHTS.md explains buckets, rounds, forms and the figure.
"""


class _Rates(msgspec.Struct, frozen=True):
    """Seconds for 1 GiB in each stage, and where they are from."""

    seconds_per_gib: dict[str, float]
    measured: tuple[str, ...]  # these stages were not given: a memory copy stands for them
    cores: int | None  # all measured: the stages share these cores

    @property
    def source(self) -> str:
        if not self.measured:
            return "as given; every stage has hardware of its own"
        if self.cores is not None:
            return f"measured: one plain memory copy on this machine, whose {self.cores} cores the stages share"
        which = " and ".join(self.measured)
        return f"{which} measured: one plain memory copy on this machine; every stage has hardware of its own"


class _Plan(msgspec.Struct, frozen=True):
    """All that was found out about one update."""

    model: str
    manifest: "Manifest"
    buckets: "tuple[Bucket, ...]"
    bucket_bytes: int
    rates: _Rates
    costs: "Costs"
    schedule: "Schedule"
    spans: "tuple[Span, ...]"
    choice: "Choice"


def add_commands(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add `weights` with its subcommands."""
    weights = choices.add_parser("weights", help="publish a model's weights, and plan updates")
    subcommands = weights.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    _add_plan(subcommands)
    publish.add_command(subcommands)
    relay.add_commands(subcommands)


# --- plan -------------------------------------------------------------------------------------------------------
def _add_plan(subcommands: "argparse._SubParsersAction[Any]") -> None:
    plan: argparse.ArgumentParser = subcommands.add_parser(
        "plan",
        help="plan an update: buckets, rounds, memory, predicted time, and a figure",
        description="Plan an update of weights without running it: cut the tensors into buckets, schedule them over "
        "the devices, predict the time of each form of overlap, choose one, and draw the first rounds.",
        epilog=_PLAN_EXAMPLES,
    )
    plan.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="?",
        type=Path,
        help="a .safetensors file, or a directory with one or with several and their index; only headers are read",
    )
    add_options(plan, PlanOptions)
    plan.set_defaults(call=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    asked = read_options(arguments, PlanOptions)
    plan = _make_plan(arguments.checkpoint, asked)
    if asked.json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(plan, asked.rounds_shown)), indent=2).decode())
        return 0
    from rich.console import Console

    _print_plan(plan, asked.rounds_shown, Console())
    return 0


def _make_plan(checkpoint: Path | None, asked: PlanOptions) -> _Plan:
    from relight.transfer.plan.cost import Choice, Costs, choose, explain, simulate
    from relight.transfer.plan.manifest import describe_bytes, make_manifest
    from relight.transfer.plan.plan import plan_buckets
    from relight.transfer.plan.schedule import Form, make_schedule

    devices, from_host = asked.devices, asked.from_host
    engines = devices if asked.engines is None else asked.engines
    bucket_bytes = read_size(asked.bucket_bytes)
    plan_buckets(make_manifest(()), bucket_bytes)  # a wrong size is said before a large file is read
    model, manifest = _model_of(checkpoint, asked.model)
    if manifest.total_bytes > MAX_BUCKETS * bucket_bytes:
        raise UsageError(
            f"{describe_bytes(manifest.total_bytes)} in buckets of {describe_bytes(bucket_bytes)} are more than "
            f"{MAX_BUCKETS} buckets: choose a larger --bucket-bytes"
        )
    buckets = plan_buckets(manifest, bucket_bytes)
    rates = _rates_of(asked)
    h2d, broadcast, reload = (rates.seconds_per_gib[stage] * bucket_bytes / 2**30 for stage in _STAGES)
    costs = Costs(h2d, broadcast, reload, engines=engines, cores=rates.cores, bucket_bytes=bucket_bytes)
    choice = choose(buckets, costs, devices=devices, from_host=from_host)
    if asked.form not in ("auto", choice.form):
        form = Form(asked.form)
        seconds = {other: choice.seconds_by_form[other] for other in Form}
        why = explain(form, seconds, buckets, costs, devices=devices, from_host=from_host)
        choice = Choice(form, seconds[form], why, choice.seconds_by_form)
    schedule = make_schedule(choice.form, devices=devices, buckets=len(buckets), from_host=from_host)
    spans = simulate(schedule, buckets, costs)
    return _Plan(model, manifest, buckets, bucket_bytes, rates, costs, schedule, spans, choice)


def _model_of(path: Path | None, words: str | None) -> "tuple[str, Manifest]":
    if (path is None) == (words is None):
        raise UsageError("name a CHECKPOINT, or describe a model with --model: one of the two (--help has examples)")
    if words is not None:
        from relight.transfer.plan.model_spec import describe_model

        return words, describe_model(words)
    assert path is not None
    from relight.transfer.tensors.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return str(path), checkpoint.manifest


def _rates_of(asked: PlanOptions) -> _Rates:
    given: dict[str, float | None] = {stage: getattr(asked, f"{stage}_seconds_per_gib") for stage in _STAGES}
    needed = _STAGES[1:] if asked.from_host else _STAGES
    missing = tuple(stage for stage in needed if given[stage] is None)
    copy = _measure_copy() if missing else 0.0
    rates = {stage: copy if seconds is None else seconds for stage, seconds in given.items()}
    cores = len(os.sched_getaffinity(0)) if missing == needed else None
    return _Rates(rates, missing, cores)


def _measure_copy() -> float:
    """Seconds to copy 1 GiB of memory here: the best of a few short copies, which take about 20 ms together."""
    source, target = bytearray(_COPIED_BYTES), memoryview(bytearray(_COPIED_BYTES))
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - start)
    return best * 2**30 / _COPIED_BYTES


# --- showing it -------------------------------------------------------------------------------------------------
def _print_plan(plan: _Plan, rounds_shown: int, console: "Console") -> None:
    from relight.transfer.plan.cost import describe_seconds
    from relight.transfer.plan.manifest import describe_bytes
    from relight.weights.figure import buffers_of, drawn_buckets, figure_of, print_figure
    from relight.weights.summary import Fact, table_of
    from relight.words import count

    facts: list[Fact] = []

    def say(name: str, words: str) -> None:
        facts.append((name, words))

    schedule, costs = plan.schedule, plan.costs
    shares = _bytes_by_device(plan)
    rows = buffers_of(schedule)
    tensors = count(len(plan.manifest.entries), "tensor")
    say("model", f"{plan.model}: {tensors}, {describe_bytes(plan.manifest.total_bytes)}")
    rounds = f"{count(schedule.rounds, 'round')} on {count(schedule.devices, 'device')}"
    say("buckets", f"{len(plan.buckets)} of {describe_bytes(plan.bucket_bytes)}, in {rounds}")
    least, most = describe_bytes(min(shares)), describe_bytes(max(shares))
    say("sends", f"{most if least == most else f'{least} to {most}'} by each device, all of it received by every other")
    memory = f"{describe_bytes(len(rows) * plan.bucket_bytes)} on each device"
    say("buffers", f"{memory}: {', '.join(rows)} of {describe_bytes(plan.bucket_bytes)}, however large the model is")
    copy = "" if schedule.from_host else f"copy {describe_seconds(costs.h2d_seconds)}, "
    stages = f"broadcast {describe_seconds(costs.broadcast_seconds)}, reload {describe_seconds(costs.reload_seconds)}"
    say("bucket", f"{copy}{stages} ({plan.rates.source})")
    say("predicted", ", ".join(f"{form} {describe_seconds(s)}" for form, s in plan.choice.seconds_by_form.items()))
    say("form", plan.choice.why)
    console.print(table_of(facts, console.encoding))
    figure = figure_of(schedule, plan.spans, rounds_shown, console.width)
    if not figure.end_seconds:
        return
    print_figure(figure, console)
    drawn = drawn_buckets(figure)
    if drawn < schedule.buckets:
        end = describe_seconds(plan.choice.seconds)
        console.print(
            f"The first {drawn} of {schedule.buckets} buckets; the last is over after {end}.", highlight=False
        )


def _as_json(plan: _Plan, rounds_shown: int) -> dict[str, Any]:
    """Everything that is printed, as numbers; names end in their unit."""
    from relight.weights.figure import buffers_of

    schedule, choice = plan.schedule, plan.choice
    rows = buffers_of(schedule)
    return {
        "model": plan.model,
        "tensors": len(plan.manifest.entries),
        "total_bytes": plan.manifest.total_bytes,
        "bucket_bytes": plan.bucket_bytes,
        "buckets": schedule.buckets,
        "devices": schedule.devices,
        "engines": plan.costs.engines,
        "rounds": schedule.rounds,
        "from_host": schedule.from_host,
        "bytes_by_device": _bytes_by_device(plan),
        "buffers": list(rows),
        "buffer_bytes_per_device": len(rows) * plan.bucket_bytes,
        "seconds_per_gib": plan.rates.seconds_per_gib,
        "measured": list(plan.rates.measured),
        "shared_cores": plan.rates.cores,
        "seconds_by_form": choice.seconds_by_form,
        "form": choice.form,
        "seconds": choice.seconds,
        "why": choice.why,
        "operations_shown": [
            {
                **msgspec.structs.asdict(operation),
                "start_seconds": span.start_seconds,
                "end_seconds": span.end_seconds,
            }
            for operation, span in zip(schedule.operations, plan.spans, strict=True)
            if operation.round < rounds_shown
        ],
    }


def _bytes_by_device(plan: _Plan) -> list[int]:
    """Return the bytes that each device sends: the tensors' bytes in its buckets."""
    sent = [0] * plan.schedule.devices
    for bucket in plan.buckets:
        sent[bucket.index % len(sent)] += sum(piece.nbytes for piece in bucket.pieces)
    return sent
