"""The inputs of `relight simulate`: its settings, from which its flags, their help and their bounds follow."""

from typing import Annotated

import msgspec

from relight.goodput.model import MAX_REPLICAS
from relight.wire.option import Option


def _seconds(text: str, *, unset: str = "", above: float | None = 0, least: float | None = None) -> Option:
    return Option("", text, metavar="S", noun="number of seconds", above=above, least=least, unset=unset)


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """A job and its cluster, as they are asked for."""

    devices: Annotated[int, Option("", "devices that train", noun="number of devices", least=1, most=10_000_000)] = (
        16_384
    )
    mtbf_device_hours: Annotated[
        float | None,
        Option(
            "",
            "mean time between interruptions of one device",
            metavar="H",
            noun="number of hours",
            above=0,
            unset="50700, as published for Llama 3 on 16,384 H100",
        ),
    ] = None
    devices_per_host: Annotated[
        int, Option("", "devices that a failure takes out: those of a host", noun="number", least=1, most=1024)
    ] = 8
    step_seconds: Annotated[float, _seconds("one training step")] = 10.0
    checkpoint_seconds: Annotated[float, _seconds("pause of the training for one checkpoint")] = 30.0
    restart_seconds: Annotated[
        float,
        _seconds(
            "from a failure to new steps without relight",
            unset="as published, 500 and 2.5 for each 1000 devices",
            above=None,
            least=0,
        ),
    ] = 0.0
    standby_hosts: Annotated[
        int | None,
        Option(
            "",
            "hosts in reserve",
            noun="number of hosts",
            least=0,
            most=1_000_000,
            unset="as many as leave one failure in a hundred without any",
        ),
    ] = None
    repair_hours: Annotated[
        float, Option("", "until a failed host is back", metavar="H", noun="number of hours", above=0)
    ] = 4.0
    replicas: Annotated[
        int, Option("", "hosts with a copy of the same shard", noun="number of hosts", least=1, most=MAX_REPLICAS)
    ] = 8
    state_gib: Annotated[
        float, Option("", "state on one device, to be copied", metavar="G", noun="number of GiB", least=0)
    ] = 20.0
    link_gib_per_second: Annotated[
        float, Option("", "network of one device: 12 are 100 Gbit/s", metavar="G", noun="number of GiB", above=0)
    ] = 12.0
    form_seconds: Annotated[
        float,
        _seconds(
            "forming the process groups again",
            unset="as published for NCCL, 2.5 for each 1000 devices",
            above=None,
            least=0,
        ),
    ] = 0.0
    days: Annotated[float, Option("", "length of the simulated job", metavar="D", noun="number of days", above=0)] = (
        54.0
    )
    seed: Annotated[int, Option("", "seed of the simulated job", metavar="SEED")] = 0
    json: Annotated[bool, Option("", "print the figures as JSON instead")] = False
