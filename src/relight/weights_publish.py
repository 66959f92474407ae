"""`relight weights publish`: a checkpoint on disk, put into every engine that asks for it. No torch."""

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relight.errors import RelightError, TransferError, UsageError

if TYPE_CHECKING:
    from relight.transfer.published import Published
    from relight.transfer.publisher import Publisher

_EXAMPLES = """\
examples:
  relight weights publish checkpoints/llama/ runs/serving           stay, and serve engines that come later, too
  relight weights publish model.safetensors runs/serving --engines 4 --once     wait for four, publish, end
  relight weights publish checkpoints/llama/ runs/serving --version 500 --sources 2

An engine names the same place: relight.Receiver("runs/serving", model=model). docs/WEIGHTS.md has the rest.

exit status: 0 every engine has the version, 1 some or all have not, 2 wrong usage
"""


def add_command(subcommands: "argparse._SubParsersAction[Any]") -> argparse.ArgumentParser:
    """Add `weights publish`."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "publish",
        help="put a safetensors checkpoint into running inference engines",
        description="Put a checkpoint into every engine that is connected at PLACE, through two shared buffers. Each "
        "byte is read from disk once. Engines that come later get the same version, until Ctrl-C.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", type=Path, help="a .safetensors file, or a directory with one or several")
    add("place", metavar="PLACE", type=Path, help="a directory that publisher and engines share; made if missing")
    add(
        "--version",
        type=int,
        default=1,
        metavar="V",
        help="what engines call these weights; default 1. An engine refuses a version older than its own",
    )
    add("--generation", type=int, default=0, metavar="G", help="goes before the version; default 0")
    add("--engines", type=int, default=1, metavar="N", help="wait for so many engines first; default 1")
    add("--once", action="store_true", help="end when these engines have the version, instead of staying")
    add("--sources", type=int, default=1, metavar="N", help="processes that read the checkpoint, in turns; default 1")
    add("--bucket-bytes", default="32MiB", metavar="SIZE", help="of each of the two buffers; default 32MiB")
    add(
        "--stall-timeout-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="who does not answer for so long is dropped; default 10",
    )
    add("--wait-seconds", type=float, default=300.0, metavar="S", help="for the engines to come; default 300")
    parser.set_defaults(call=_publish, command="weights publish")
    return parser


def _publish(arguments: argparse.Namespace) -> int:
    from relight.transfer.checkpoint import open_checkpoint
    from relight.transfer.manifest import describe_bytes, parse_bytes
    from relight.transfer.publisher import Publisher

    if arguments.engines < 1 or arguments.sources < 1:
        raise UsageError("--engines and --sources: at least 1")
    try:
        bucket_bytes = parse_bytes(arguments.bucket_bytes)
    except ValueError as error:
        raise UsageError(f"--bucket-bytes {arguments.bucket_bytes}: not a size, such as 64MiB") from error
    try:
        arguments.place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{arguments.place} cannot be made: {error.strerror}") from error
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # also where a shell has them ignored
        signal.signal(number, _interrupt)
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        with (
            open_checkpoint(arguments.checkpoint) as checkpoint,
            Publisher(
                arguments.place,
                bucket_bytes=bucket_bytes,
                stall_timeout_seconds=arguments.stall_timeout_seconds,
                on_notice=_say,
            ) as publisher,
        ):
            manifest = checkpoint.manifest
            _say(f"{len(manifest.entries)} tensors, {describe_bytes(manifest.total_bytes)}; engines: {arguments.place}")
            helpers += [_start_source(arguments) for _ in range(arguments.sources - 1)]
            if not _gather(publisher, arguments):
                return 1
            handle = publisher.begin(
                checkpoint, version=arguments.version, generation=arguments.generation, hold=not arguments.once
            )
            while (result := handle.wait(0.5)) is None:
                pass
            _report(result)
            if arguments.once:
                return 0 if not result.error and not result.dropped else 1
            _say("serving engines that come later; Ctrl-C ends it")
            threading.Event().wait()
    except TransferError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()
    return 0


def _interrupt(_: int, __: object) -> None:
    raise KeyboardInterrupt


def _gather(publisher: "Publisher", arguments: argparse.Namespace) -> bool:
    if not publisher.wait_for_engines(arguments.engines, arguments.wait_seconds):
        here = len(publisher.engines())
        _say(f"{here} of {arguments.engines} engines came within {arguments.wait_seconds:g} s")
        return False
    return publisher.wait_for_sources(arguments.sources - 1, arguments.wait_seconds)


def _report(result: "Published") -> None:
    names = ", ".join(result.engines) or "no engine"
    _say(f"version {result.version}: {names}")
    for name, why in sorted(result.dropped.items()):
        _say(f"not {name}: {why}")


def _start_source(arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Another process that reads the checkpoint, each bucket by one of them."""
    words = [str(arguments.checkpoint), str(arguments.place), str(arguments.version), str(os.getpid())]
    return subprocess.Popen([sys.executable, "-m", "relight.weights_publish", *words], start_new_session=True)


def _say(text: str) -> None:
    print(f"relight: {text}", file=sys.stderr, flush=True)


def _serve_as_source() -> int:
    """`python -m relight.weights_publish CHECKPOINT PLACE VERSION PARENT`: started by `--sources`."""
    from relight.parent import end_with_parent
    from relight.transfer.checkpoint import open_checkpoint
    from relight.transfer.source import SourceLink

    checkpoint, place, version, parent = sys.argv[1:]
    end_with_parent(int(parent))
    try:
        with open_checkpoint(Path(checkpoint)) as source:
            SourceLink(place, source, version=int(version)).run()
    except RelightError as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_serve_as_source())
