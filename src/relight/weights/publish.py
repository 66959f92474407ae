"""`relight weights publish`: a checkpoint on disk, put into every engine that asks for it. No torch."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from relight.errors import RelightError, TransferError, UsageError
from relight.flags import add_options, read_options
from relight.weights.options import PublishOptions, read_size

if TYPE_CHECKING:
    from relight.transfer.plan.manifest import Manifest
    from relight.transfer.plan.update.result import Published
    from relight.transfer.publish.publisher import Publisher
    from relight.transfer.tensors.checkpoint import Checkpoint
    from relight.weights.screen import Screen

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TURN_SECONDS = 0.1  # between two looks at how far it is
_EXAMPLES = """\
examples:
  relight weights publish checkpoints/llama/ runs/serving           stay, and serve engines that come later, too
  relight weights publish model.safetensors runs/serving --engines 4 --once     wait for four, publish, end
  relight weights publish checkpoints/llama/ runs/serving --version 500 --sources 2
  relight weights publish model.safetensors runs/serving --once --draw --trace update.json

On a terminal a bar shows the progress of every engine. The last lines say where the time went: the duration of the
update, the work of each source and each engine, and the engines that have the version. More: docs/WEIGHTS.md.

An engine names the same directory: relight.Receiver("runs/serving", model=model).

exit status: 0 every engine has the version, 1 some or all have not, 2 wrong command line
"""


def add_command(subcommands: "argparse._SubParsersAction[Any]") -> None:
    """Add `weights publish`."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "publish",
        help="put a safetensors checkpoint into running inference engines",
        description="Put a checkpoint into every engine connected at PLACE, through two shared buffers. Each "
        "byte is read from disk once. Engines that come later get the same version, until Ctrl-C.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors file, or a directory with one or several")
    add("place", metavar="PLACE", type=Path, help="a directory that publisher and engines share; made if missing")
    add_options(parser, PublishOptions)
    parser.set_defaults(call=_publish)


def _publish(arguments: argparse.Namespace) -> int:
    from relight.transfer.plan.manifest import describe_bytes
    from relight.transfer.publish.publisher import Publisher
    from relight.transfer.tensors.checkpoint import open_checkpoint
    from relight.weights.screen import Screen

    asked = read_options(arguments, PublishOptions)
    bucket_bytes = read_size(asked.bucket_bytes)
    try:
        arguments.place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{arguments.place} cannot be made: {error.strerror}") from error
    for number in _ENDING:  # also where a shell has them ignored
        signal.signal(number, _interrupt)
    helpers: list[subprocess.Popen[bytes]] = []
    screen = Screen()
    try:
        with (
            open_checkpoint(arguments.checkpoint) as checkpoint,
            Publisher(
                arguments.place,
                bucket_bytes=bucket_bytes,
                stall_timeout_seconds=asked.stall_timeout_seconds,
                on_notice=screen.say,
            ) as publisher,
            _open_trace(asked.trace) as trace,
        ):
            manifest = checkpoint.manifest
            total = describe_bytes(manifest.total_bytes)
            screen.say(f"{len(manifest.entries)} tensors, {total}; engines: {arguments.place}")
            helpers += [_start_source(arguments) for _ in range(asked.sources - 1)]
            try:
                if not _gather(publisher, asked, screen):
                    return 1
                result = _move(publisher, checkpoint, asked, screen)
            finally:
                screen.clear()  # before anything else is said
            _report(result, manifest, screen, draw=asked.draw, trace=trace)
            if asked.once:
                return 0 if not result.error and not result.dropped else 1
            screen.say("serving engines that come later; Ctrl-C ends it")
            threading.Event().wait()
    except TransferError as error:
        screen.say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        screen.close()
        for helper in helpers:
            helper.kill()
            helper.wait()
    return 0


def _interrupt(_: int, __: object) -> None:
    """Once is enough: a second one must not break off the cleaning up."""
    for number in _ENDING:
        # Not SIG_IGN: for one that is under way already, Python would then print an exception.
        signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


def _open_trace(path: Path | None) -> "contextlib.AbstractContextManager[IO[bytes] | None]":
    """Check at once that it can be written, and not after an hour."""
    if path is None:
        return contextlib.nullcontext()
    try:
        return path.open("wb")
    except OSError as error:
        raise UsageError(f"--trace {path} cannot be written: {error.strerror}") from error


def _gather(publisher: "Publisher", asked: PublishOptions, screen: "Screen") -> bool:
    """Wait for the engines, then for the other sources."""
    engines, sources, patience = asked.engines, asked.sources - 1, asked.wait_seconds
    return _wait("engine", engines, publisher.wait_for_engines, publisher.engines, patience, screen) and _wait(
        "further source", sources, publisher.wait_for_sources, publisher.sources, patience, screen
    )


def _wait(
    noun: str,
    wanted: int,
    wait: Callable[[int, float], bool],
    members: Callable[[], Sequence[object]],
    patience_seconds: float,
    screen: "Screen",
) -> bool:
    end = time.monotonic() + patience_seconds
    while not wait(wanted, min(_TURN_SECONDS, max(0.0, end - time.monotonic()))):
        here = len(members())
        if time.monotonic() >= end:
            screen.clear()
            screen.say(f"{here} of {wanted} {noun}s came within {patience_seconds:g} s")
            return False
        screen.waiting(here, wanted, noun)
    return True


def _move(publisher: "Publisher", checkpoint: "Checkpoint", asked: PublishOptions, screen: "Screen") -> "Published":
    version, generation = asked.version, asked.generation
    handle = publisher.begin(checkpoint, version=version, generation=generation, hold=not asked.once)
    begun = time.monotonic()
    while (result := handle.wait(_TURN_SECONDS)) is None:
        progress = handle.progress()
        if progress.held_buckets < progress.total_buckets:
            screen.moving(progress, time.monotonic() - begun)
        else:
            engines = publisher.engines()
            have = sum((engine.generation, engine.version) == (generation, version) for engine in engines)
            screen.taking(have, len(engines))
    return result


def _report(
    result: "Published", manifest: "Manifest", screen: "Screen", *, draw: bool, trace: "IO[bytes] | None"
) -> None:
    """Show where the time went: on standard output, and in the trace."""
    from rich.console import Console

    from relight.transfer.plan.cost import describe_seconds
    from relight.transfer.plan.plan import plan_buckets
    from relight.transfer.plan.timings import measure, plan_again
    from relight.weights.figure import MEASURED_WORDS, drawn_buckets, figure_of_measured, print_figure
    from relight.weights.summary import facts_of, table_of
    from relight.weights.trace import trace_of

    buckets = plan_buckets(manifest, result.bucket_bytes)
    measured = measure(result, buckets)
    schedule, spans = plan_again(measured, buckets, result.bucket_bytes)
    console = Console()
    console.print(table_of(facts_of(result, measured), console.encoding), highlight=False)
    if draw:
        figure = figure_of_measured(result, schedule, spans, console.width)
        if figure.end_seconds:
            print_figure(figure, console, MEASURED_WORDS)
            means = f"{describe_seconds(measured.write_seconds)} to write a bucket"
            means += f", {describe_seconds(measured.reload_seconds)} to reload it"
            drawn = drawn_buckets(figure)
            cut = f"The first {drawn} of {result.buckets} buckets. " if drawn < result.buckets else ""
            console.print(f"{cut}Planned with the measured means: {means}.", highlight=False)
        else:
            console.print("No bucket was moved: there is nothing to draw.", highlight=False)
    if trace is not None:
        try:
            trace.write(trace_of(result, measured, buckets, schedule, spans))
            trace.flush()
        except OSError as error:  # the engines have their weights all the same
            screen.say(f"--trace {trace.name} cannot be written: {error.strerror}")


def _start_source(arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Another process that reads the checkpoint, each bucket by one of them."""
    words = [str(arguments.checkpoint), str(arguments.place), str(arguments.version), str(os.getpid())]
    return subprocess.Popen([sys.executable, "-P", "-m", "relight.weights.publish", *words], start_new_session=True)


def _serve_as_source() -> int:
    """`python -m relight.weights.publish CHECKPOINT PLACE VERSION PARENT`: started by `--sources`."""
    from relight.parent import end_with_parent
    from relight.transfer.publish.source import SourceLink
    from relight.transfer.tensors.checkpoint import open_checkpoint

    checkpoint, place, version, parent = sys.argv[1:]
    end_with_parent(int(parent))
    try:
        with open_checkpoint(Path(checkpoint)) as source:
            SourceLink(place, source, version=int(version)).run()
    except RelightError as error:
        print(f"relight: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_serve_as_source())
