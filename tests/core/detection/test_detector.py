"""The detector blames the rank that the others wait for, and none that is merely slow or starved."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from relight.core.detection.detector import Detector, DetectorSettings
from relight.core.detection.pace import TRACED_RANKS
from relight.core.detection.sampling import Sample
from relight.core.protocol.events import CommunicationStalled, Event, ProcessSuspected
from relight.core.protocol.position import Phase, Position

SECOND = 10**9
START_NS = 1_000 * SECOND
SETTINGS = DetectorSettings(
    hang_timeout_seconds=30.0,
    outside_hang_timeout_seconds=600.0,
    startup_timeout_seconds=300.0,
    frozen_timeout_seconds=1.0,
)


_INHERITS = (Phase.PARKED, Phase.STANDBY)  # here a version comes from another process


class Rank:
    """A pretended rank: stamps like a worker, on a clock that the test moves."""

    def __init__(self, rank: int) -> None:
        self.process = f"w{rank}"
        self.position = Position(generation=1, rank=rank, stamp_ns=START_NS)
        self.state = "S"
        self.run_delay_ns = 0

    def stamp(self, clock_ns: int, **changes: Any) -> None:
        if changes.get("version", 0) > self.position.version and self.position.phase not in _INHERITS:
            changes.setdefault("commits", self.position.commits + 1)
        self.position = msgspec.structs.replace(
            self.position, progress=self.position.progress + 1, stamp_ns=clock_ns, **changes
        )


class World:
    """Ranks, one clock and one detector; samples are taken every 0.25 s unless said otherwise."""

    def __init__(self, size: int, settings: DetectorSettings = SETTINGS) -> None:
        self.ranks = [Rank(rank) for rank in range(size)]
        self.detector = Detector(settings)
        self.clock_ns = START_NS
        self.events: list[Event] = []
        self.event_times: list[float] = []

    @property
    def seconds(self) -> float:
        return (self.clock_ns - START_NS) / SECOND

    def stamp(self, ranks: Iterable[int], **changes: object) -> None:
        for rank in ranks:
            self.ranks[rank].stamp(self.clock_ns, **changes)

    def sample(self, heard: Iterable[int] | None = None) -> None:
        """Sample all ranks, or only these."""
        ranks = self.ranks if heard is None else [self.ranks[rank] for rank in heard]
        samples = tuple(
            Sample(
                process=rank.process,
                position=rank.position,
                state=rank.state,
                run_delay_ns=rank.run_delay_ns,
                rss_bytes=0,
                sampled_ns=self.clock_ns,
            )
            for rank in ranks
        )
        members = {number: rank.process for number, rank in enumerate(self.ranks)}
        found = self.detector.observe(samples, members, self.seconds)
        self.events += found
        self.event_times += [self.seconds] * len(found)

    def run(self, seconds: float, every: float = 0.25, each: Callable[[], None] | None = None) -> None:
        """Let time pass, sampling at a steady pace; `each` runs before every sample."""
        for _ in range(round(seconds / every)):
            self.clock_ns += round(every * SECOND)
            if each is not None:
                each()
            self.sample()

    def step(self, number: int, seconds: float = 0.5) -> None:
        """All ranks take one step, with a sample in each phase."""
        everyone = range(len(self.ranks))
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.BARRIER, Phase.OPTIMIZER):
            self.stamp(everyone, phase=phase, step=number)
            self.run(seconds / 4, every=seconds / 4)
        self.stamp(everyone, phase=Phase.OUTSIDE, version=number + 1)
        self.run(0.25)

    def warm(self, steps: int = 2) -> None:
        """Past the first steps, in which nothing is known yet."""
        for number in range(steps):
            self.step(number)


def suspicion(world: World) -> ProcessSuspected:
    assert len(world.events) == 1, world.events
    (event,) = world.events
    assert isinstance(event, ProcessSuspected)
    return event


def test_a_rank_that_the_others_wait_for_is_blamed_with_numbers() -> None:
    world = World(4)
    world.warm()
    world.stamp(range(4), phase=Phase.FORWARD, step=2)
    world.run(0.25)
    world.stamp(range(4), phase=Phase.BACKWARD, step=2)
    world.run(0.25)
    world.stamp([0, 1, 3], phase=Phase.BARRIER)
    begun = world.seconds
    world.run(29.0)
    assert not world.events
    world.run(2.0)
    event = suspicion(world)
    assert (event.process, event.kind) == ("w2", "hang")
    assert event.evidence == (
        "no progress in BACKWARD of step 2 for 30.5 s while ranks 0, 1 and 3 wait in BARRIER "
        "(limit 30.0 s; the longest such phase so far took 0.2 s)"
    )
    assert event.position.phase is Phase.BACKWARD
    assert 29.5 <= world.event_times[0] - begun <= 30.5


def test_steps_that_are_shorter_than_the_time_between_two_samples_count() -> None:
    """Seen in STARTING, then in the fourth step: that it finished steps of its own is not seen, but stamped."""
    world = World(2)
    world.stamp([0, 1], phase=Phase.STARTING)
    world.run(0.25)
    world.stamp([0], phase=Phase.BARRIER, step=3, version=3, commits=3)
    world.stamp([1], phase=Phase.BACKWARD, step=3, version=3, commits=3)
    world.run(31.0)
    assert suspicion(world).process == "w1"


def test_each_process_is_suspected_once() -> None:
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.BACKWARD, step=2)
    world.stamp([0], phase=Phase.BARRIER)
    world.run(120.0)
    assert suspicion(world).process == "w1"


def test_a_collective_that_one_rank_has_not_entered() -> None:
    world = World(3)
    world.warm()
    world.stamp(range(3), phase=Phase.BACKWARD, step=2, collectives=6)
    world.stamp([0, 2], collectives=7)
    world.run(31.0)
    event = suspicion(world)
    assert event.process == "w1"
    assert "while ranks 0 and 2 wait in BACKWARD" in event.evidence


def test_all_ranks_idle_at_the_same_place_is_the_network() -> None:
    world = World(3)
    world.warm()
    world.stamp(range(3), phase=Phase.BACKWARD, step=2, collectives=7)
    world.run(90.0)
    assert len(world.events) == 1
    assert isinstance(world.events[0], CommunicationStalled)
    assert "BACKWARD of step 2" in world.events[0].evidence
    # A new generation that stalls again is told again.
    world.stamp(range(3), generation=2, phase=Phase.BACKWARD, collectives=1)
    world.run(90.0)
    assert [type(event) for event in world.events] == [CommunicationStalled, CommunicationStalled]


def test_a_rank_alone() -> None:
    world = World(1)
    world.warm()
    world.stamp([0], phase=Phase.FORWARD, step=2)
    world.run(29.0)
    assert not world.events
    world.run(2.0)
    assert suspicion(world).evidence.startswith("no progress in FORWARD of step 2 for 30")


def test_a_long_evaluation_on_rank_0_is_not_blamed_before_its_own_limit() -> None:
    world = World(3)
    world.warm()
    world.stamp([1, 2], phase=Phase.FORWARD, step=2)
    world.stamp([1, 2], phase=Phase.BACKWARD)
    world.run(595.0)
    assert not world.events
    world.run(10.0)
    event = suspicion(world)
    assert event.process == "w0"
    assert "the code before step 2" in event.evidence
    assert "limit 600.0 s" in event.evidence
    assert "--outside-hang-timeout-seconds" in event.evidence


def test_waiting_for_an_evaluation_does_not_teach_that_a_backward_takes_minutes() -> None:
    world = World(2)
    world.warm()
    world.stamp([1], phase=Phase.FORWARD, step=2)
    world.stamp([1], phase=Phase.BACKWARD)
    world.run(300.0)
    world.step(2)
    world.stamp([0, 1], phase=Phase.BACKWARD, step=3)
    world.stamp([0], phase=Phase.BARRIER)
    world.run(31.0)
    assert suspicion(world).process == "w1"


def test_long_phases_raise_the_limit() -> None:
    world = World(2)
    for number in range(3):
        world.stamp([0, 1], phase=Phase.FORWARD, step=number)
        world.run(0.5)
        world.stamp([0, 1], phase=Phase.BACKWARD)
        world.run(10.0)
        world.stamp([0, 1], phase=Phase.BARRIER)
        world.run(0.5)
        world.stamp([0, 1], phase=Phase.OUTSIDE, version=number + 1)
        world.run(0.25)
    world.stamp([0, 1], phase=Phase.BACKWARD, step=3)
    world.stamp([0], phase=Phase.BARRIER)
    world.run(90.0)
    assert not world.events
    world.run(15.0)
    event = suspicion(world)
    assert event.process == "w1"
    assert "the longest such phase so far took 10.0 s" in event.evidence


def test_the_first_step_may_take_as_long_as_the_start() -> None:
    world = World(2)
    world.stamp([0, 1], phase=Phase.FORWARD, step=0)
    world.stamp([0], phase=Phase.BACKWARD)
    world.run(295.0)
    assert not world.events
    world.run(10.0)
    assert suspicion(world).process == "w1"


def test_a_replacement_that_was_restored_has_not_yet_taken_a_step_of_its_own() -> None:
    world = World(2)
    world.warm()
    world.ranks[1].process = "w9"
    world.ranks[1].position = Position(generation=2, rank=1, phase=Phase.PARKED, stamp_ns=world.clock_ns)
    world.stamp([0], generation=2, phase=Phase.PARKED)
    world.run(1.0)
    world.stamp([0, 1], phase=Phase.FORWARD, step=2, version=2)
    world.run(1.0)
    world.stamp([0], phase=Phase.BACKWARD)
    world.run(60.0)
    assert not world.events


def test_a_starved_machine_is_not_a_hang() -> None:
    """The rank wants to run all the time and gets no processor for minutes."""
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.BACKWARD, step=2)
    world.stamp([0], phase=Phase.BARRIER)

    def starve() -> None:
        world.ranks[1].run_delay_ns += round(0.24 * SECOND)

    world.run(300.0, each=starve)
    assert not world.events


def test_a_starved_agent_that_samples_rarely_blames_nobody_for_it() -> None:
    """No sample was taken for a minute (a suspended terminal, a starved agent): that minute counts for no rank."""
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.BACKWARD, step=2)
    world.stamp([0], phase=Phase.BARRIER)
    world.run(5.0)
    world.run(60.0, every=60.0)
    world.run(5.0)
    assert not world.events
    world.run(30.0)
    assert suspicion(world).process == "w1"


def test_a_late_delivery_does_not_count() -> None:
    """Idle time is measured on the worker's own host, so the controller's clock does not matter."""
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.BACKWARD, step=2)
    world.stamp([0], phase=Phase.BARRIER)
    world.run(1.0)
    members = {number: rank.process for number, rank in enumerate(world.ranks)}
    assert world.detector.observe((), members, world.seconds + 1_000.0) == ()


def test_frozen_after_a_second() -> None:
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.BACKWARD, step=2)
    world.run(0.25)
    world.ranks[1].state = "T"
    begun = world.seconds
    world.run(3.0)
    event = suspicion(world)
    assert (event.process, event.kind) == ("w1", "frozen")
    assert "BACKWARD of step 2" in event.evidence
    assert 1.0 <= world.event_times[0] - begun <= 1.5


def test_a_frozen_standby_is_noticed_too() -> None:
    world = World(2)
    world.warm()
    standby = Sample(
        process="w7",
        position=Position(phase=Phase.STANDBY, stamp_ns=START_NS),
        state="T",
        run_delay_ns=0,
        rss_bytes=0,
        sampled_ns=0,
    )
    members = {number: rank.process for number, rank in enumerate(world.ranks)}
    found: list[Event] = []
    for tick in range(8):
        sample = msgspec.structs.replace(standby, sampled_ns=world.clock_ns + tick * SECOND // 4)
        found += world.detector.observe((sample,), members, world.seconds + tick / 4)
    assert [event.process for event in found if isinstance(event, ProcessSuspected)] == ["w7"]


def test_a_straggler_that_is_stopped_and_continued_is_slow_not_dead() -> None:
    """A duty cycle of SIGSTOP and SIGCONT: every step takes seconds, but it does progress."""
    world = World(2)
    world.warm()
    for number in range(2, 10):
        world.stamp([0, 1], phase=Phase.FORWARD, step=number)
        for _ in range(3):
            world.ranks[1].state = "T"
            world.run(0.75)
            world.ranks[1].state = "R"
            world.run(0.25)
        world.stamp([0, 1], phase=Phase.BACKWARD)
        world.run(0.25)
        world.stamp([0, 1], phase=Phase.OUTSIDE, version=number + 1)
    assert not world.events


def test_two_looks_far_apart_do_not_prove_that_it_was_stopped_between() -> None:
    world = World(1)
    world.warm()
    world.ranks[0].state = "T"
    world.sample()
    world.run(60.0, every=60.0)
    world.ranks[0].state = "R"
    world.run(1.0)
    assert not world.events


def test_parked_and_done_are_left_to_the_core() -> None:
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.PARKED, generation=2)
    world.run(290.0, every=0.5)
    world.stamp([0, 1], phase=Phase.DONE, generation=2)
    world.run(1_000.0, every=0.5)
    assert not world.events


def test_ranks_that_are_all_parked_for_ever_are_told_of_now_and_then() -> None:
    """They may all have hung just after Resume; where the core waits for something itself, it does not listen."""
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.PARKED, generation=2)
    world.run(610.0, every=0.5)
    assert [type(event) for event in world.events] == [CommunicationStalled, CommunicationStalled]
    assert 300.0 <= world.event_times[1] - world.event_times[0] <= 301.0
    assert isinstance(world.events[0], CommunicationStalled)
    assert "all 2 wait there" in world.events[0].evidence


def test_time_in_which_nobody_looked_counts_for_nobody_not_even_behind_a_stamp() -> None:
    """The controller slept; a rank stamped just before, and has waited ever since for an order of the controller."""
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.FORWARD, step=2)
    world.run(0.25)
    world.stamp([0, 1], phase=Phase.PARKED, generation=2)
    world.clock_ns += 100 * SECOND
    world.stamp([0], phase=Phase.FORWARD)
    world.sample()
    world.run(20.0)
    assert not world.events
    world.run(20.0)
    assert suspicion(world).process == "w1"


def test_a_rank_that_stays_parked_while_its_peers_train_is_blamed() -> None:
    """Resume was sent, so the core waits for no rank: only the detector can notice."""
    world = World(3)
    world.warm()
    world.stamp(range(3), phase=Phase.PARKED, generation=2)
    world.run(1.0)
    world.stamp([0, 1], phase=Phase.FORWARD, step=2)
    world.stamp([0, 1], phase=Phase.BACKWARD)
    world.run(31.0)
    event = suspicion(world)
    assert event.process == "w2"
    assert "while ranks 0 and 1 wait in BACKWARD" in event.evidence


def test_a_survivor_that_does_not_stop_hangs() -> None:
    """The others are parked in a newer generation and wait for it; its own phase says how long it may take."""
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.BACKWARD, step=2)
    world.stamp([1], phase=Phase.PARKED, generation=2)
    world.run(100.0)
    assert suspicion(world).process == "w0"


def test_a_rank_done_waits_for_one_that_hangs_in_the_last_step() -> None:
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.OPTIMIZER, step=2)
    world.stamp([0], phase=Phase.DONE, version=3)
    world.run(31.0)
    event = suspicion(world)
    assert event.process == "w1"
    assert "OPTIMIZER of step 2" in event.evidence


def test_nobody_is_judged_before_every_rank_was_seen() -> None:
    world = World(2)
    world.warm()
    world.stamp([0, 1], phase=Phase.BACKWARD, step=2)
    members = {0: "w0", 1: "w1", 2: "w2"}
    for _ in range(400):
        world.clock_ns += SECOND // 4
        sample = Sample(
            process="w0",
            position=world.ranks[0].position,
            state="S",
            run_delay_ns=0,
            rss_bytes=0,
            sampled_ns=world.clock_ns,
        )
        assert world.detector.observe((sample,), members, world.seconds) == ()


def test_who_waited_long_for_another_is_not_blamed_for_stopping_a_moment_later() -> None:
    """A rank hung, and the survivors waited for it, idle for longer than the limit. One of them stops first."""
    world = World(3)
    world.warm()
    world.stamp(range(3), phase=Phase.FORWARD, step=2)
    world.stamp([0, 1], phase=Phase.BACKWARD)
    world.run(31.0)
    assert suspicion(world).process == "w2"
    world.stamp([0], phase=Phase.PARKED, generation=2)
    world.stamp([2], phase=Phase.PARKED, generation=2)  # its replacement
    world.run(29.0)
    assert suspicion(world).process == "w2"
    world.run(2.0)
    assert [event.process for event in world.events if isinstance(event, ProcessSuspected)] == ["w2", "w1"]


def test_a_rank_that_finishes_its_step_is_no_sign_that_the_others_may_go_on() -> None:
    """Forward: prepared ranks write by themselves, while the replacement waits, parked, for one of them."""
    world = World(3)
    world.warm()
    world.stamp(range(3), phase=Phase.PARKED, generation=2)
    world.run(60.0)
    world.stamp([0], phase=Phase.OPTIMIZER, step=2)
    world.run(29.0)
    assert not world.events
    world.stamp([0], phase=Phase.PARKED, version=3)
    world.run(60.0)
    assert not world.events


def test_who_hangs_while_the_others_wait_for_orders_is_blamed() -> None:
    """A survivor hangs in the write that it finishes by itself; its peers are parked, and may be so forever."""
    world = World(3)
    world.warm()
    world.stamp(range(3), phase=Phase.PARKED, generation=2)
    world.stamp([0], phase=Phase.OPTIMIZER, step=2)
    world.run(31.0)
    event = suspicion(world)
    assert event.process == "w0"
    assert "while ranks 1 and 2 wait in PARKED" in event.evidence


def test_a_rank_that_stays_parked_when_its_peers_are_done_is_blamed() -> None:
    world = World(3)
    world.warm()
    world.stamp(range(3), phase=Phase.PARKED, generation=2, version=3)
    world.run(1.0)
    world.stamp([0, 1], phase=Phase.DONE)
    world.run(31.0)
    assert suspicion(world).process == "w2"


# --- large jobs -----------------------------------------------------------------------------------------------------
def test_samples_that_are_as_rare_as_agents_were_told_are_not_late() -> None:
    """With ten thousand hosts a sample comes every four seconds; a hang is noticed two samples after its time-out."""
    world = World(4)
    world.detector.expect(4.0)
    for number in range(3):
        world.stamp(range(4), phase=Phase.FORWARD, step=number)
        world.run(4.0, every=4.0)
        world.stamp(range(4), phase=Phase.OUTSIDE, version=number + 1)
        world.run(4.0, every=4.0)
    world.stamp(range(4), phase=Phase.BACKWARD, step=3)
    world.stamp([0, 1, 3], phase=Phase.BARRIER)
    begun = world.seconds
    world.run(60.0, every=4.0)
    assert suspicion(world).process == "w2"
    assert SETTINGS.hang_timeout_seconds < world.event_times[0] - begun <= SETTINGS.hang_timeout_seconds + 2 * 4.0


def test_nobody_is_blamed_by_a_sample_that_has_cleared_it_before() -> None:
    """Rank 1 waited long for rank 0, and no sample came for a while. Then rank 0 is heard of, and rank 1 not yet."""
    world = World(2)
    world.detector.expect(8.0)
    world.warm()
    world.stamp([1], phase=Phase.BACKWARD, step=2)
    world.run(40.0, every=8.0)
    world.run(40.0, every=40.0)
    world.stamp([0], phase=Phase.DONE, generation=2, version=3)
    world.clock_ns += 8 * SECOND
    world.sample(heard=[0])
    assert not world.events
    world.run(48.0, every=8.0)
    assert suspicion(world).process == "w1"  # it has not got on since


def test_in_a_large_job_a_hang_is_found_though_not_every_sample_is_judged() -> None:
    size = TRACED_RANKS + 8
    world = World(size)
    for number in range(2):
        world.stamp(range(size), phase=Phase.BACKWARD, step=number)
        world.run(1.0)
        world.stamp(range(size), phase=Phase.OUTSIDE, version=number + 1)
        world.run(1.0)
    world.stamp(range(size), phase=Phase.BACKWARD, step=2)
    world.stamp([rank for rank in range(size) if rank != 5], phase=Phase.BARRIER)
    begun = world.seconds
    world.run(40.0, every=0.5)
    assert suspicion(world).process == "w5"
    assert SETTINGS.hang_timeout_seconds < world.event_times[0] - begun <= SETTINGS.hang_timeout_seconds + 2.0
