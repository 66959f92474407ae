"""`relight simulate`: what failures would cost a job of so many devices, with and without relight. No torch."""

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import msgspec

from relight.flags import add_options, read_options
from relight.goodput.inputs import Inputs

if TYPE_CHECKING:
    from relight.goodput.model import Cluster

SIZES = (8, 64, 512, 1024, 4096, 16_384, 32_768, 100_000)
_LEAST_BAR, _MOST_BAR = 5, 40
_OTHER_COLUMNS = 51  # of the table, besides the two bars
_EXAMPLES = """\
examples:
  relight simulate                                                  16,384 devices, published failure rates
  relight simulate --devices 1024 --standby-hosts 2 --step-seconds 4
  relight simulate --devices 100000 --checkpoint-seconds 5 --restart-seconds 300
  relight simulate --json

Where the figures are from, and what is left out: docs/SCALE.md
"""


class _Estimate(msgspec.Struct, frozen=True):
    """The result for one number of devices: shares of the time, and seconds."""

    devices: int
    seconds_between_failures: float
    best_interval_seconds: float
    restart_seconds: float
    restart_goodput: float
    recovery_seconds: float
    relight_goodput: float
    relight_goodput_of_all_hosts: float  # the standbys counted as hosts that do nothing
    chance_of_no_standby: float
    standby_hosts_for_one_percent: int
    years_between_shard_losses: float


def add_command(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add `simulate`."""
    parser: argparse.ArgumentParser = choices.add_parser(
        "simulate",
        help="what failures would cost a large job, with and without relight",
        description="Estimate the goodput (the share of time in which new steps are computed) of a job that restarts "
        "from checkpoints at the best interval, and of the same job with relight; how many standbys to hold; and how "
        "often all replicas of a shard would be lost.",
        epilog=_EXAMPLES,
    )
    add_options(parser, Inputs)
    parser.set_defaults(call=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    inputs = read_options(arguments, Inputs)
    cluster = _cluster_of(inputs)
    sizes = sorted({*SIZES, cluster.devices})
    estimates = [_estimate(_of_size(cluster, devices)) for devices in sizes]
    simulated = _simulated(cluster, inputs.days * 86_400, inputs.seed)
    if inputs.json:
        document = {"cluster": dataclasses.asdict(cluster), "estimates": estimates, "simulated": simulated}
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return 0
    _print(cluster, estimates, simulated, inputs.days)
    return 0


def _cluster_of(inputs: Inputs) -> "Cluster":
    from relight.goodput.model import MTBF_DEVICE_SECONDS, Cluster

    hours = inputs.mtbf_device_hours
    cluster = Cluster(
        devices=inputs.devices,
        mtbf_device_seconds=MTBF_DEVICE_SECONDS if hours is None else hours * 3600,
        step_seconds=inputs.step_seconds,
        checkpoint_seconds=inputs.checkpoint_seconds,
        restart_seconds=inputs.restart_seconds,
        form_seconds=inputs.form_seconds,
        state_bytes=inputs.state_gib * 2**30,
        link_bytes_per_second=inputs.link_gib_per_second * 2**30,
        replicas=inputs.replicas,
        devices_per_host=inputs.devices_per_host,
        standby_hosts=inputs.standby_hosts or 0,
        repair_seconds=inputs.repair_hours * 3600,
    )
    return cluster if inputs.standby_hosts is not None else _with_standbys(cluster)


def _of_size(cluster: "Cluster", devices: int) -> "Cluster":
    """Return the inputs with another number of devices, and as many standbys as one failure in a hundred needs."""
    return cluster if devices == cluster.devices else _with_standbys(dataclasses.replace(cluster, devices=devices))


def _with_standbys(cluster: "Cluster") -> "Cluster":
    from relight.goodput.model import standbys_for

    return dataclasses.replace(cluster, standby_hosts=standbys_for(cluster, 0.01))


def _estimate(cluster: "Cluster") -> _Estimate:
    from relight.goodput import model as goodput

    interval = goodput.best_interval_seconds(cluster)
    hosts = math.ceil(cluster.devices / cluster.devices_per_host)
    relight = goodput.relight_goodput(cluster)
    losses = goodput.shard_losses_per_second(cluster)
    return _Estimate(
        devices=cluster.devices,
        seconds_between_failures=1 / cluster.failures_per_second,
        best_interval_seconds=interval,
        restart_seconds=cluster.restart,
        restart_goodput=goodput.restart_goodput(cluster, interval),
        recovery_seconds=cluster.recovery,
        relight_goodput=relight,
        relight_goodput_of_all_hosts=relight * hosts / (hosts + cluster.standby_hosts),
        chance_of_no_standby=goodput.chance_of_no_standby(cluster, cluster.standby_hosts),
        standby_hosts_for_one_percent=goodput.standbys_for(cluster, 0.01),
        years_between_shard_losses=1 / (losses * 365.25 * 86_400) if losses else math.inf,
    )


def _simulated(cluster: "Cluster", duration_seconds: float, seed: int) -> dict[str, float]:
    from relight.goodput import model as goodput

    interval = goodput.best_interval_seconds(cluster)
    return {
        "restart_goodput": goodput.simulate_restart(cluster, interval, duration_seconds, seed),
        "relight_goodput": goodput.simulate_relight(cluster, duration_seconds, seed),
    }


# --- showing it ---------------------------------------------------------------------------------------------------
def _print(cluster: "Cluster", estimates: list[_Estimate], simulated: dict[str, float], days: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    blocks = ("█", "░") if console.encoding.lower().startswith("utf") else ("#", ".")
    mine = next(estimate for estimate in estimates if estimate.devices == cluster.devices)
    facts = Table.grid(padding=(0, 1))
    facts.add_column(style="bold", min_width=9)
    facts.add_column(overflow="fold")
    for name, words in _sentences(cluster, mine, simulated, days):
        facts.add_row(name, Text(words))
    console.print(facts)
    console.print()
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("devices", "failure every", "standbys", "restart", "", "relight", ""):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    columns = max(_LEAST_BAR, min(_MOST_BAR, (console.width - _OTHER_COLUMNS) // 2))
    for estimate in estimates:
        style = "bold" if estimate is mine else ""
        table.add_row(
            f"{estimate.devices:,}",
            _duration(estimate.seconds_between_failures),
            str(cluster.standby_hosts if estimate is mine else estimate.standby_hosts_for_one_percent),
            f"{estimate.restart_goodput:.1%}",
            _bar(estimate.restart_goodput, columns, blocks),
            f"{estimate.relight_goodput:.1%}",
            _bar(estimate.relight_goodput, columns, blocks),
            style=style,
        )
    console.print(table)


def _sentences(cluster: "Cluster", mine: _Estimate, simulated: dict[str, float], days: float) -> list[tuple[str, str]]:
    saved = (mine.relight_goodput - mine.restart_goodput) * 24
    lasting = mine.years_between_shard_losses
    losses = (
        "practically never"
        if lasting > 1e6
        else f"once in {lasting:,.2g} years"
        if lasting > 1
        else (f"once in {_duration(lasting * 365.25 * 86_400)}")
    )
    return [
        ("job", f"{cluster.devices:,} devices; a failure every {_duration(mine.seconds_between_failures)}"),
        (
            "restart",
            f"{mine.restart_goodput:.1%} goodput: checkpoints every {_duration(mine.best_interval_seconds)} (the best "
            f"interval), {_duration(mine.restart_seconds)} for each restart",
        ),
        (
            "relight",
            f"{mine.relight_goodput:.1%} goodput: {_duration(mine.recovery_seconds)} for each recovery and at most one "
            f"step; {mine.relight_goodput_of_all_hosts:.1%} of all hosts if the standbys count as idle",
        ),
        ("saved", f"{saved:.1f} hours of each day"),
        (
            "standbys",
            f"{cluster.standby_hosts} hosts: {mine.chance_of_no_standby:.2%} of the failures find none left and wait "
            f"for another host; {mine.standby_hosts_for_one_percent} are enough for 1 %",
        ),
        ("replicas", f"all {cluster.replicas} of some shard lost in one recovery: {losses}"),
        (
            "simulated",
            f"{days:g} days, failure by failure: restart {simulated['restart_goodput']:.1%}, relight "
            f"{simulated['relight_goodput']:.1%}",
        ),
    ]


def _bar(share: float, columns: int, blocks: tuple[str, str]) -> str:
    filled = round(share * columns)
    return blocks[0] * filled + blocks[1] * (columns - filled)


def _duration(seconds: float) -> str:
    """ "3.1 h": two figures that say something."""
    for unit, size in (("years", 365.25 * 86_400), ("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
