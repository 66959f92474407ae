"""The settings of the commands `relight weights ...`, from which flags, help and bounds follow. No torch."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from relight.errors import UsageError
from relight.wire.option import Option

_MOST = 4096  # devices, engines, rounds


def _rate(stage: str) -> Option:
    return Option(
        "",
        f"seconds that the {stage} takes for 1 GiB",
        metavar="S",
        noun="number of seconds",
        least=0,
        unset="measured, one memory copy on this machine",
    )


class BridgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A gate or a relay, and its connection with the other."""

    token_file: Annotated[Path, Option("", "the secret that gate and relays share", metavar="FILE")]
    tls_ca: Annotated[
        str,
        Option("", "use TLS, and accept only hosts whose certificate this authority has signed", metavar="PEM"),
    ] = ""
    tls_cert: Annotated[
        str,
        Option(
            "",
            "this host's certificate; the gate's is for the name or address that relays are given",
            metavar="PEM",
        ),
    ] = ""
    tls_key: Annotated[str, Option("", "the key of --tls-cert", metavar="PEM")] = ""


class RelayOptions(BridgeOptions, frozen=True, kw_only=True):
    """A relay."""

    name: Annotated[
        str | None,
        Option("", "name of this relay, for people", metavar="NAME", unset="made of host name and process"),
    ] = None


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An update to be planned."""

    model: Annotated[
        str | None,
        Option("", "a Llama-like model in words, instead of CHECKPOINT; see the examples", metavar="WORDS"),
    ] = None
    devices: Annotated[
        int,
        Option("", "devices that hold the weights and take turns", noun="number of devices", least=1, most=_MOST),
    ] = 1
    engines: Annotated[
        int | None,
        Option(
            "",
            "engines that reload at the same time",
            metavar="E",
            noun="number of engines",
            least=1,
            most=_MOST,
            unset="one for each device",
        ),
    ] = None
    bucket_bytes: Annotated[str, Option("", "size of one buffer, such as 64MiB", metavar="SIZE")] = "32MiB"
    form: Annotated[
        Literal["auto", "serial", "two-stage", "three-stage"],
        Option("", "how far the stages overlap", unset="auto, the fastest, or a simpler one within 2 %"),
    ] = "auto"
    h2d_seconds_per_gib: Annotated[float | None, _rate("host-to-device copy")] = None
    broadcast_seconds_per_gib: Annotated[float | None, _rate("broadcast")] = None
    reload_seconds_per_gib: Annotated[float | None, _rate("reload by one engine")] = None
    from_host: Annotated[bool, Option("", "the devices are host memory: there is no host-to-device copy")] = False
    rounds_shown: Annotated[
        int, Option("", "rounds to draw; 0 draws none", noun="number of rounds", least=0, most=_MOST)
    ] = 2
    json: Annotated[bool, Option("", "print the plan and the rounds shown as JSON instead")] = False


class PublishOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to be published."""

    version: Annotated[
        int,
        Option(
            "",
            "version of these weights in the engines. An engine refuses a version older than its own",
            metavar="V",
        ),
    ] = 1
    generation: Annotated[int, Option("", "takes precedence over the version", metavar="G")] = 0
    engines: Annotated[
        int, Option("", "wait for N engines first; a relay is one", noun="number of engines", least=1)
    ] = 1
    once: Annotated[bool, Option("", "end when these engines have the version, instead of serving later ones")] = False
    sources: Annotated[
        int, Option("", "processes that read the checkpoint, in turns", noun="number of sources", least=1)
    ] = 1
    bucket_bytes: Annotated[str, Option("", "size of each of the two buffers", metavar="SIZE")] = "32MiB"
    stall_timeout_seconds: Annotated[
        float, Option("", "drop an engine or source that does not answer for this long", metavar="S")
    ] = 10.0
    wait_seconds: Annotated[float, Option("", "time limit for engines to connect; inf: none", metavar="S")] = 300.0
    draw: Annotated[bool, Option("", "draw the first buckets as measured, below the plan")] = False
    trace: Annotated[
        Path | None, Option("", "write every stage of the update to FILE, for ui.perfetto.dev", metavar="FILE")
    ] = None


def read_size(text: str) -> int:
    """Return the bytes of --bucket-bytes. Raises UsageError."""
    from relight.transfer.plan.manifest import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"--bucket-bytes {text}: write a size such as 8MiB or 65536") from error
