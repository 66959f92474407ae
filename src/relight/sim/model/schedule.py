"""A simulated job's schedule: its size, its pace and its faults. A value, drawn from a seed; it runs nothing."""

import random
from collections.abc import Collection, Sequence

import msgspec

from relight.core.protocol.fault import Action
from relight.sim.model.shapes import SHAPES
from relight.sim.model.worker.points import OTHER_POINTS, RECOVERY_POINTS, SHAPE_POINTS, STEP_POINTS

ACTIONS = (Action.KILL, Action.FREEZE, Action.RAISE, Action.EXIT, Action.LOOP, Action.CUT)


class ProcessFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Strikes when the `nth` process comes to `point`, or, without a point, when `nth` things have happened."""

    action: Action
    nth: int
    point: str = ""
    pick: int = 0  # without a point: which of the live processes, counted round
    thaw_seconds: float = 0.0  # a frozen process wakes up again after so long; 0: never
    holds_lock: bool = False  # a looping process keeps the interpreter's lock, so that its other threads stop too


class NetworkFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Strikes when `nth` things have happened.

    "silence": nothing passes between the node and the controller for `seconds`, in one direction or in both.
    "blackhole": what the ranks send to each other vanishes; no connection ends.
    "agent": the agent dies with what it had not passed on, and its successor takes over after `seconds`.
    "asleep": the controller's process is stopped for `seconds`; its deadlines pass meanwhile.
    "controller": it dies with the next event, having sent `sent` of the orders that this led to; its
    successor comes after `seconds`, and agents report the newest `repeated` things again, which were not confirmed.

    Of `host`, counted round the hosts after the first, on which the controller runs:

    "host": it is lost with all that it runs; with `up`, silently: no connection to it ends.
    "cut": for `seconds`, nothing passes between it and the controller (in one direction or in both), and nothing
    between it and the other hosts.
    "unheard": the same towards the controller only.
    "join": one more host joins; where hosts are `remade`, on a machine that has failed, if there is one.
    "drain": it is to be left in order.
    "faulty": its hardware reports a fault.
    """

    kind: str
    nth: int
    seconds: float = 0.0
    up: bool = True  # towards the controller
    down: bool = True
    sent: int = 0
    repeated: int = 0
    host: int = 0


SAMPLE_SECONDS = 0.5  # between two samples of a host
HOST_KINDS = ("host", "cut", "unheard", "join")
KINDS = ("hosts", "supply", "fallback", "flips", "writes", "leaves")  # that a search may be narrowed down to
NETWORK_KINDS = ("silence", "blackhole", "agent", "asleep", "controller")


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that a run depends on. `seed` decides delays and what a broken collective loses."""

    seed: int
    world_size: int
    standbys: int = 0
    until: int = 3
    leaves: int = 0  # the scripts leave their loops by themselves after so many steps; 0: they do not
    faults: tuple[ProcessFault, ...] = ()
    network: tuple[NetworkFault, ...] = ()
    slow_messages: float = 0.0  # part of the messages that take up to a second
    repeated_messages: float = 0.0  # part of the messages that come again, up to three seconds later
    late_messages: float = 0.0  # part of the messages that later ones overtake
    seen_dying: float = 0.0  # part of the deaths that are seen before the process's memory is freed
    slow_rank: int = -1  # it needs 30 times as long for everything
    watched: bool = False  # the detector looks from the beginning, and not only once something hangs
    nodes: int = 1  # hosts that share the ranks
    spares: int = 0  # hosts beside them that are there from the start
    supplies: bool = False  # hosts are ordered of a cluster
    supply_spares: int = -1  # so many are kept beside the nodes; -1: lost hosts are replaced
    remade: bool = False  # the cluster makes hosts again, perhaps on the same machine
    derivable: bool = False  # private state follows from rank and step, so that it is not lost with a host
    gathers: bool = False  # agents send what every rank says once in one message
    parts: int = 1  # of the state: rank r holds part r % parts
    buddy_every: int = 0  # steps from one snapshot in a buddy's memory to the next; 0: there are none
    checkpoint_every: int = 0  # the same of checkpoints on disk
    verify_every: int = 0  # steps from one comparison of the ranks' states to the next; 0: they are not compared
    shapes: tuple[str, ...] = ()  # of the steps, one after another and round again; none: all of one write
    relearns: bool = False  # the first step after a recovery has its barrier at the end
    learns: bool = False  # ranks learn from their steps where the barrier stands
    bug_step: int = -1  # the script raises there on rank 0, each time
    sample_seconds: float = (
        SAMPLE_SECONDS  # between two samples of a host; if longer, hosts are sampled in turn, as with many
    )


def encode_schedule(schedule: Schedule) -> str:
    """The schedule on one line."""
    return msgspec.json.encode(schedule).decode()


def decode_schedule(text: str | bytes) -> Schedule:
    """The inverse of `encode_schedule`. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Schedule)


def schedule_of(seed: int, kinds: Collection[str]) -> Schedule:
    """The random schedule of this seed, of these `KINDS`; "leaves" stands alone."""
    if "leaves" in kinds:
        return leaving_schedule(seed)
    return random_schedule(
        seed,
        hosts="hosts" in kinds or "supply" in kinds or None,
        supply="supply" in kinds or None,
        fallback="fallback" in kinds,
        flips="flips" in kinds,
        writes="writes" in kinds or None,
    )


def leaving_schedule(seed: int) -> Schedule:
    """A random schedule on one host, of scripts that leave their loops with steps to go.

    With so few faults that some rank lives which has run the code that decides on it; else no rank knows.
    """
    draw = random.Random(f"leaves? {seed}")
    schedule = _on_one_host(seed, draw.choice((0, 1, 1, 1, 2)), (), ())
    world_size = max(schedule.world_size, len(schedule.faults) + 2)
    more = draw.choice((1, 2, 5))
    return msgspec.structs.replace(schedule, world_size=world_size, leaves=schedule.until, until=schedule.until + more)


def random_schedule(
    seed: int,
    *,
    faults: int | None = None,
    actions: Sequence[Action] = (),
    points: Sequence[str] = (),
    hosts: bool | None = None,
    supply: bool | None = None,
    fallback: bool = False,
    flips: bool = False,
    writes: bool | None = None,
) -> Schedule:
    """Swarm style: which kinds of fault occur at all, how many, where and how close together differs by seed.

    Args:
        seed: gives the same schedule everywhere.
        faults: of processes, so many; None: up to four.
        actions: of these kinds only, if there are any.
        points: at these only, if there are any.
        hosts: whether there are several; None: every fifth time, where the faults are not told.
        supply: whether hosts are ordered; None: every third time, where there are several.
        fallback: whether there must be fallback tiers; else every eighth time.
        flips: whether some rank's state must be silently corrupted; else every twelfth time, where faults are not told.
        writes: whether steps may have several writes; None: every fourth time, where the faults are not told.
    """
    told = bool(actions or points or faults is not None)
    schedule = _on_one_host(seed, faults, actions, points)
    if hosts is None:
        hosts = not told and random.Random(f"hosts? {seed}").random() < 0.2
    schedule = _with_hosts(schedule) if hosts else schedule
    schedule = _with_supply(schedule, told=supply) if hosts else schedule
    draw = random.Random(f"parts? {seed}")
    parts = draw.choice((2, 2, 3)) if draw.random() < 0.2 else 1
    schedule = msgspec.structs.replace(
        schedule,
        parts=parts if 2 * parts <= schedule.world_size or draw.random() < 0.2 else 1,
        sample_seconds=random.Random(f"pace? {seed}").choice((0.5, 0.5, 0.5, 2.0, 8.0)),
    )
    draw = random.Random(f"ladder? {seed}")
    schedule = _with_fallback(schedule, draw) if draw.random() < 0.12 or fallback else schedule
    draw = random.Random(f"flips? {seed}")
    schedule = _with_flips(schedule, draw, points) if flips or (draw.random() < 0.08 and not told) else schedule
    draw = random.Random(f"writes? {seed}")
    is_told = draw.random() < 0.25 and not told if writes is None else writes
    return _with_writes(schedule, draw, moves=not points) if is_told else schedule


def _on_one_host(seed: int, faults: int | None, actions: Sequence[Action], points: Sequence[str]) -> Schedule:
    """Draw size, pace and faults."""
    draw = random.Random(f"schedule {seed}")
    chance, choice = draw.random, draw.choice
    allowed = list(actions) or [action for action in ACTIONS if chance() < 0.5] or [Action.KILL]
    count = choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 4)) if faults is None else faults
    world_size, until = choice((2, 2, 3, 3, 4, 5)), choice((2, 2, 3, 4))
    planned: list[ProcessFault] = []
    for _ in range(count):
        if planned and chance() < 0.35:
            planned.append(_soon_after(draw, planned[-1], choice(allowed)))
        else:
            places = points or ((*STEP_POINTS, *RECOVERY_POINTS) if planned else (*STEP_POINTS, *OTHER_POINTS))
            planned.append(_random_fault(draw, choice(allowed), places, world_size, until))
    hostile = [kind for kind in NETWORK_KINDS if chance() < 0.25] if chance() < 0.4 else []
    return Schedule(
        seed=seed,
        world_size=world_size,
        standbys=choice((0, 1, 2, 3)),
        until=until,
        faults=tuple(planned),
        network=tuple(_random_network_fault(draw, choice(hostile)) for _ in range(choice((1, 1, 2)) if hostile else 0)),
        slow_messages=choice((0.0, 0.0, 0.05, 0.2)),
        repeated_messages=choice((0.0, 0.0, 0.0, 0.05, 0.3)),
        late_messages=choice((0.0, 0.0, 0.0, 0.0, 0.05)),
        seen_dying=choice((0.0, 0.5, 1.0)),
        slow_rank=choice((-1, -1, -1, 0, world_size - 1)),
        watched=chance() < 0.1,
        gathers=random.Random(f"gathers? {seed}").random() < 0.5,
    )


def _with_writes(schedule: Schedule, draw: random.Random, *, moves: bool) -> Schedule:
    """Steps with several writes, or with their barrier at the end; some faults move to where only these get."""
    rare = [name for name, shape in SHAPES.items() if shape.script.is_rare]
    known = [name for name in SHAPES if not (SHAPES[name].is_surprise or name in rare)]
    shapes = [draw.choice(known) for _ in range(draw.choice((1, 1, 2, 3)))]
    if draw.random() < 0.25:
        shapes[draw.randrange(len(shapes))] = draw.choice(("surprise", "surprise", "unexpected", "late-change"))
    faults = [
        msgspec.structs.replace(fault, point=draw.choice(SHAPE_POINTS))
        if moves and fault.point in STEP_POINTS and draw.random() < 0.5
        else fault
        for fault in schedule.faults
    ]
    relearns, learns = draw.random() < 0.4, draw.random() < 0.3
    return msgspec.structs.replace(
        schedule,
        shapes=tuple(shapes),
        relearns=relearns and not learns,
        learns=learns,
        until=schedule.until + 2 * learns,
        faults=tuple(faults),
    )


def _with_flips(schedule: Schedule, draw: random.Random, points: Sequence[str] = ()) -> Schedule:
    """Bits of a rank's state that flip by themselves, in a job that compares states; few other faults."""
    until = schedule.until + draw.choice((0, 1, 2))
    flips = tuple(
        ProcessFault(
            action=Action.FLIP_PARAMETER,
            point=draw.choice(points or ((*STEP_POINTS, *RECOVERY_POINTS) if number else STEP_POINTS)),
            nth=1 + int(draw.random() * schedule.world_size * until),
        )
        for number in range(draw.choice((1, 1, 2)))
    )
    others = [
        msgspec.structs.replace(fault, point="COMPARE", nth=1 + fault.nth % (2 * schedule.world_size))
        if draw.random() < 0.25
        else fault
        for fault in schedule.faults[: draw.choice((0, 0, 1, 2))]
    ]
    return msgspec.structs.replace(
        schedule,
        faults=(*others, *flips),
        network=schedule.network if draw.random() < 0.5 else (),
        until=until,
        verify_every=draw.choice((1, 1, 1, 2)),
    )


def _with_fallback(schedule: Schedule, draw: random.Random) -> Schedule:
    """Parts that few hold, and fallback tiers."""
    size = schedule.world_size
    buddy_every, checkpoint_every = draw.choice(((1, 0), (1, 2), (2, 0), (2, 3), (3, 1), (0, 1), (0, 2)))
    schedule = msgspec.structs.replace(
        schedule,
        parts=draw.choice((min(2, size), min(3, size), size)),
        buddy_every=buddy_every,
        checkpoint_every=checkpoint_every,
        until=schedule.until + draw.choice((0, 1, 2, 4)),
    )
    if not checkpoint_every or draw.random() < 0.7:
        return schedule
    # A job that must end, and writes a last checkpoint before.
    return msgspec.structs.replace(schedule, bug_step=int(draw.random() * schedule.until), parts=draw.choice((1, 1, 2)))


def _with_hosts(schedule: Schedule) -> Schedule:
    """Drawn apart, so that schedules of one host are what they were before there were others."""
    draw = random.Random(f"hosts {schedule.seed}")
    nodes, per_host = draw.choice(((2, 1), (2, 2), (2, 2), (3, 1), (3, 2), (4, 1)))
    kinds = [kind for kind in HOST_KINDS if draw.random() < 0.6] or ["host"]
    troubles = [_random_host_fault(draw, draw.choice(kinds)) for _ in range(draw.choice((1, 1, 2, 2, 3)))]
    others = [msgspec.structs.replace(trouble, host=int(draw.random() * nodes)) for trouble in schedule.network]
    schedule = msgspec.structs.replace(
        schedule,
        world_size=nodes * per_host,
        network=(*others, *troubles),
        nodes=nodes,
        spares=random.Random(f"spares {schedule.seed}").choice((0, 0, 0, 1, 2)),
        derivable=draw.random() < 0.7,
    )
    draw = random.Random(f"drain {schedule.seed}")
    schedule = _with_drain(schedule, draw) if draw.random() < 0.3 else schedule
    draw = random.Random(f"remade {schedule.seed}")
    return _with_remade(schedule, draw) if draw.random() < 0.3 else schedule


def _with_remade(schedule: Schedule, draw: random.Random) -> Schedule:
    """A host that fails, and others that are made again in its place."""
    count = draw.choice((1, 2, 4, 5))
    comings = [NetworkFault(kind="join", nth=30 + int(draw.random() * 200)) for _ in range(count)]
    fault = NetworkFault(kind="faulty", nth=20 + int(draw.random() * 100), host=int(draw.random() * 4))
    more = draw.choice((0, 4, 8))
    return msgspec.structs.replace(
        schedule, remade=True, network=(*schedule.network, fault, *comings), until=schedule.until + more
    )


def _with_drain(schedule: Schedule, draw: random.Random) -> Schedule:
    """A host that is left in order while the job trains, most often with room elsewhere; sometimes nothing else."""
    kinds = random.Random(f"faulty {schedule.seed}")  # drawn apart: all else is as it was before
    drains = tuple(
        NetworkFault(
            kind="faulty" if kinds.random() < 0.3 else "drain",
            nth=20 + int(draw.random() * 150),
            host=int(draw.random() * 4),
        )
        for _ in range(draw.choice((1, 1, 1, 2)))
    )
    is_alone = draw.random() < 0.4
    return msgspec.structs.replace(
        schedule,
        faults=() if is_alone else schedule.faults,
        network=drains if is_alone else (*schedule.network, *drains),
        standbys=draw.choice((1, 2, 2, 3)),
        spares=draw.choice((0, 1, 1, 2)),
        until=schedule.until + draw.choice((4, 8)),
    )


def _with_supply(schedule: Schedule, *, told: bool | None) -> Schedule:
    """A cluster that supplies hosts, and a job that lasts long enough for some to come."""
    draw = random.Random(f"supply {schedule.seed}")
    is_on = draw.random() < 0.3
    if not (is_on if told is None else told):
        return schedule
    return msgspec.structs.replace(
        schedule,
        supplies=True,
        supply_spares=draw.choice((-1, -1, 0, 1, 2)),
        until=schedule.until + draw.choice((0, 8, 40)),
    )


def _random_host_fault(draw: random.Random, kind: str) -> NetworkFault:
    up, down = draw.choice(((True, True), (True, True), (True, False), (False, True)))
    return NetworkFault(
        kind=kind,
        nth=20 + int(draw.random() * 250),
        seconds=round(draw.choice((draw.uniform(0.1, 10.0), draw.uniform(10.0, 90.0))), 3),
        up=up,
        down=down,
        host=int(draw.random() * 4),
    )


def _random_fault(
    draw: random.Random, action: Action, places: Sequence[str], world_size: int, until: int
) -> ProcessFault:
    thaw = draw.choice((0.0, 0.0, 0.5, 1.5)) if action is Action.FREEZE else 0.0
    holds_lock = action is Action.LOOP and draw.random() < 0.5
    if draw.random() < 0.7:
        point = draw.choice(places)
        steps = until if point in STEP_POINTS and point != "DONE" else 1
        nth = 1 + int(draw.random() * world_size * steps)
        return ProcessFault(action=action, point=point, nth=nth, thaw_seconds=thaw, holds_lock=holds_lock)
    nth = 1 + int(draw.random() * (40 + 20 * world_size * until))
    pick = int(draw.random() * 10)
    return ProcessFault(action=action, nth=nth, pick=pick, thaw_seconds=thaw, holds_lock=holds_lock)


def _soon_after(draw: random.Random, fault: ProcessFault, action: Action) -> ProcessFault:
    """Close to the one before, where recoveries are at their most fragile."""
    near = draw.choice((1, 2)) if fault.point else int(draw.random() * 25)
    return msgspec.structs.replace(fault, action=action, nth=fault.nth + near, pick=int(draw.random() * 10))


_LENGTHS = {
    "silence": (0.1, 8.0),
    "blackhole": (0.0, 0.0),
    "agent": (0.05, 2.0),
    "asleep": (0.5, 60.0),
    "controller": (0.0, 8.0),
}


def _random_network_fault(draw: random.Random, kind: str) -> NetworkFault:
    nth = (1 if kind == "controller" else 20) + int(draw.random() * 250)
    up, down = draw.choice(((True, True), (True, False), (False, True)))
    both = kind != "silence"
    seconds = _LENGTHS[kind]
    length = round(seconds[0] + (seconds[1] - seconds[0]) * draw.random() ** 2, 3)
    sent, repeated = (int(draw.random() * 5), int(draw.random() * 4)) if kind == "controller" else (0, 0)
    return NetworkFault(
        kind=kind, nth=nth, seconds=length, up=up or both, down=down or both, sent=sent, repeated=repeated
    )
