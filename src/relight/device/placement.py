"""The device that each process of a job works on, and the collectives by which tensors travel. Pure."""

from dataclasses import dataclass

from relight.errors import UsageError


@dataclass(frozen=True)
class Devices:
    """The accelerators of one host, as far as placing needs to know them."""

    count: int  # 0: processes work on the CPU
    type: str = "cpu"
    has_gloo: bool = True  # gloo can carry their tensors
    backend_name: str | None = None


@dataclass(frozen=True)
class Placement:
    """Equal on every process of a job whose hosts have equally many devices."""

    has_own_collectives: bool  # False: gloo carries the tensors
    builds_late: bool  # a standby builds its modules when it knows its rank, on the device of that rank
    notice: str = ""  # for people: a slower way was taken, and why


def place(devices: Devices, ranks: int, standbys: int, *, late_standby: bool | None) -> Placement:
    """Place so many ranks and standbys of one host on its devices.

    Collectives of devices refuse two ranks on one device. Where each rank has a device, a standby that has none to
    itself waits to build until it knows its rank, unless `late_standby` is False. Raises UsageError if gloo would have
    to carry tensors that it cannot carry: if ranks share devices, or torch has no collectives for the devices.
    """
    late = bool(late_standby)
    if not devices.count:
        return Placement(has_own_collectives=False, builds_late=late)
    have = devices.count
    if devices.backend_name is None:
        lack = f"torch has no collectives for devices of type {devices.type!r} here"
        if not devices.has_gloo:
            raise UsageError(f"{lack}: import the package that registers them before relight.init()")
        return Placement(
            has_own_collectives=False,
            builds_late=late,
            notice=f"{lack}, so gloo carries tensors through host memory, which is slower: install a torch with them",
        )
    if have >= ranks + standbys or (have >= ranks and late):
        return Placement(has_own_collectives=True, builds_late=late)
    if have >= ranks and late_standby is None:
        return Placement(
            has_own_collectives=True,
            builds_late=True,
            notice=f"{ranks} ranks and {standbys} standbys have {have} devices of type {devices.type!r}: a standby has "
            "none to itself, so it builds its modules only when it takes a rank. A recovery takes longer by that time",
        )
    needed = ranks if have < ranks else ranks + standbys
    if not devices.has_gloo:
        raise UsageError(
            f"{ranks} ranks and {standbys} standbys have {have} devices of type {devices.type!r}, whose collectives "
            f"need one device for each rank. Start fewer, or use a machine with {needed} devices"
        )
    return Placement(
        has_own_collectives=False,
        builds_late=late,
        notice=f"{ranks} ranks and {standbys} standbys share {have} devices of type {devices.type!r}. "
        f"{devices.backend_name} needs one for each, so gloo carries their tensors through host memory, which is "
        f"slower. With {needed} devices it is not needed",
    )
