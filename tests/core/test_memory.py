"""The memory of a controller does not grow with the number of its recoveries; the journal still has all of them."""

import functools
import gc
import types
from collections import Counter

import pytest

from relight.core.account.job_stats import KEPT_IN_ACCOUNT, KEPT_NOTICES
from relight.core.controller import Controller
from relight.core.membership.recent import KEPT, Recent
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, EndJob
from relight.core.protocol.position import Phase, Position
from relight.core.protocol.record import Record
from relight.core.replay import replay
from relight.sim.timed.job import JournalEntry
from tests.core.test_controller import Desk

SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class Recorded(Desk):
    """Keeps what a journal would have."""

    def __init__(self, *, world_size: int = 3) -> None:
        self.entries: list[JournalEntry] = []
        super().__init__(world_size=world_size, standbys=1)

    def tell(self, event: ev.Event, seconds: float = 0.001) -> tuple[Command, ...]:
        said = super().tell(event, seconds)
        self.entries.append(JournalEntry(self.now, event, said))
        return said

    def lose_and_replace(self, step: int) -> None:
        """One failure of each kind that leaves something, one after the other, with a recovery each."""
        processes = self.controller.rank_processes()
        rank = step % len(processes)
        victim = processes[rank]
        position = Position(rank=rank, step=step, version=step, phase=Phase.FORWARD, private_versions=(step, -1))
        match step % 3:
            case 0:
                self.raises(victim, f"ValueError: {step}", step=step)
                self.exits(victim, 1, step=step, evidence="exited with status 1")
            case 1:
                self.tell(ev.ProcessDying(process=victim, position=position, noticed_ns=1))
                self.exits(victim, -11, step=step, evidence="was killed by SIGSEGV")
            case 2:
                self.suspect(victim, "hang", step)
                self.exits(victim, step=step)
        self.recover(step)
        self.started()
        for standby in self.controller.members.standbys():
            self.warm(standby.name)


def remembered(controller: Controller) -> Counter[str]:
    """Objects that only this controller holds, by their kinds."""
    seen: dict[int, object] = {}
    waiting: list[object] = [controller]
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen and not isinstance(thing, SHARED):
            seen[id(thing)] = thing
            waiting += gc.get_referents(thing)
    return Counter(type(thing).__name__ for thing in seen.values() if not isinstance(thing, int | float))


def test_a_thousand_recoveries_are_remembered_like_five_hundred() -> None:
    desk = Recorded().train()
    assert isinstance(desk, Recorded)
    for step in range(500):
        desk.lose_and_replace(step)
    early = remembered(desk.controller)
    for step in range(500, 1001):
        desk.lose_and_replace(step)
    late = remembered(desk.controller)
    grown = {kind: (early[kind], late[kind]) for kind in late if abs(late[kind] - early[kind]) > 6}
    assert not grown, f"objects after 500 and after 1001 recoveries: {grown}"
    report = desk.controller.report()
    assert desk.controller.job_stats.failures.count == 1001
    assert [failure.number for failure in report.failures] == list(range(1002 - KEPT_IN_ACCOUNT, 1002))
    assert len(desk.controller.members.processes) < 10


def test_standbys_that_die_leave_nothing_behind_though_no_rank_fails() -> None:
    """The next recovery, at which others are forgotten, may be months away."""
    desk = Recorded().train()
    assert isinstance(desk, Recorded)

    def lose_standbys(count: int) -> Counter[str]:
        for _ in range(count):
            (standby,) = desk.controller.members.standbys()
            desk.wait(120.0)  # long enough to show that standbys as such work
            desk.raises(standby.name, "MemoryError: of a standby")
            desk.exits(standby.name, 1)
            desk.started()
            desk.warm(desk.controller.members.standbys()[0].name)
        return remembered(desk.controller)

    early = lose_standbys(20)
    late = lose_standbys(300)
    grown = {kind: (early[kind], late[kind]) for kind in late if abs(late[kind] - early[kind]) > 6}
    assert not grown, f"objects after 20 and after 320 standbys: {grown}"
    assert len(desk.controller.members.processes) == 4


def test_what_workers_say_is_remembered_for_a_while_and_said_once() -> None:
    desk = Recorded().train()
    assert isinstance(desk, Recorded)
    for number in range(2 * KEPT_NOTICES):
        note = ev.WorkerNotice(process="w0", rank=0, text=f"note {number}")
        assert desk.tell(note) != ()
        assert desk.tell(note) == ()
    assert len(desk.controller.report().notices) == KEPT_NOTICES
    told = [Record(entry.now, entry.event) for entry in desk.entries]
    whole = replay(desk.controller.settings, told, functools.partial(Controller, full_account=True)).report()
    assert desk.controller.job_stats.forgot
    assert [int(text.split()[1]) for text in whole.notices] == list(range(2 * KEPT_NOTICES))


def test_the_journal_gives_the_whole_account_and_the_same_sums() -> None:
    desk = Recorded().train()
    assert isinstance(desk, Recorded)
    for step in range(2 * KEPT_IN_ACCOUNT):
        desk.lose_and_replace(step)
    short = desk.controller.report()
    settings = desk.controller.settings
    told = [Record(entry.now, entry.event) for entry in desk.entries]
    whole = replay(settings, told, functools.partial(Controller, full_account=True)).report()
    assert [failure.number for failure in whole.failures] == list(range(1, 2 * KEPT_IN_ACCOUNT + 1))
    assert [recovery.failures for recovery in whole.recoveries] == [(n,) for n in range(1, 2 * KEPT_IN_ACCOUNT + 1)]
    assert whole.failures[-KEPT_IN_ACCOUNT:] == short.failures
    assert whole.recoveries[-KEPT_IN_ACCOUNT:] == short.recoveries
    assert whole.steps_repeated == short.steps_repeated
    assert whole.time_lost_seconds == short.time_lost_seconds
    assert {"exception", "exited", "hang", "killed"} >= {failure.kind for failure in whole.failures}


def test_a_death_is_explained_though_it_is_forgotten_in_the_account() -> None:
    """Its memory takes so long to be freed that many others have failed meanwhile."""
    desk = Desk(world_size=2 * KEPT_IN_ACCOUNT, standbys=0).train()
    first = desk.controller.rank_processes()[0]
    position = Position(step=0, phase=Phase.FORWARD, private_versions=(0, -1))
    desk.tell(ev.ProcessDying(process=first, position=position, noticed_ns=1))
    for rank in range(1, KEPT_IN_ACCOUNT + 5):
        step = rank // 4  # more at one step would end the job
        desk.exits(desk.controller.rank_processes()[rank], step=step)
    said = desk.exits(first)
    assert not any(isinstance(command, EndJob) for command in said)
    assert "failure 1: its process was killed by SIGKILL" in said[0].why
    assert not desk.controller.job_stats.failures.unexplained


def test_limits_count_what_happened_lately() -> None:
    counts: Recent[int] = Recent()
    for thing in range(KEPT):
        counts.add(thing)
    counts.add(0)  # again: it is the newest now
    counts.add(KEPT)
    assert counts[0] == 2
    assert counts[1] == 0
    assert 1 not in counts, "a question leaves nothing"
    twin = counts.copy()
    twin.add(0)
    assert (counts[0], twin[0], len(twin)) == (2, 3, KEPT)


@pytest.mark.parametrize("late", [False, True])
def test_who_is_forgotten_can_still_be_spoken_of(late: bool) -> None:
    """An agent may say the end of a process twice, and the second time long after."""
    desk = Recorded().train()
    assert isinstance(desk, Recorded)
    victim = desk.controller.rank_processes()[0]
    for step in range(3 if late else 1):
        desk.lose_and_replace(3 * step)  # always rank 0
    assert (victim in desk.controller.members.processes) is not late
    again = ev.ProcessExited(
        process=victim, exit_status=-9, evidence="was killed by SIGKILL", position=Position(), noticed_ns=1
    )
    assert desk.tell(again) == ()
    assert desk.controller.job_stats.failures.count == (3 if late else 1)
