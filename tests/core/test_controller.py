"""The controller's policies, one fact at a time: what it starts, whom it blames, when it gives up, and what it says."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import pytest

from relight.core.controller import HEARING_SECONDS, Controller, ControllerSettings, Stage
from relight.core.job.failing import COLLECTIVE_GRACE_SECONDS
from relight.core.job.reserve import STANDBY_PATIENCE_SECONDS
from relight.core.protocol import events as ev
from relight.core.protocol.commands import (
    Assign,
    Begin,
    Command,
    EndJob,
    Kill,
    Notice,
    Release,
    Restore,
    Resume,
    Spawn,
    Stop,
    WindDown,
)
from relight.core.protocol.position import Phase, Position
from relight.core.stages.deciding import MAX_SOURCES_PER_TARGET
from relight.core.stages.processes import STANDBY_PROVEN_SECONDS

Order = TypeVar("Order")
RESTORE_TIMEOUT_SECONDS = 50.0
STOP_TIMEOUT_SECONDS = 20.0
OUTSIDE_SECONDS = 40.0


class Desk:
    """A controller, and the facts that a test lays before it. Ranks start as processes w0, w1, ...; standbys follow."""

    def __init__(self, world_size: int = 2, standbys: int = 0, **settings: float | str | None) -> None:
        """Among `settings`, `slots` is the room of the first host; it is one for each rank otherwise."""
        base = ControllerSettings(
            world_size=world_size,
            standbys=standbys,
            stop_timeout_seconds=STOP_TIMEOUT_SECONDS,
            outside_hang_timeout_seconds=OUTSIDE_SECONDS,
            restore_timeout_seconds=RESTORE_TIMEOUT_SECONDS,
            startup_timeout_seconds=300.0,
        )
        slots = int(settings.pop("slots", 0) or world_size)
        self.settings = msgspec.structs.replace(base, **settings)
        self.controller = Controller(self.settings)
        self.now = 0.0
        self.said = self.tell(ev.AgentJoined(agent="node-0", slots=slots), 0.0)

    # --- facts --------------------------------------------------------------------------------------------------
    def tell(self, event: ev.Event, seconds: float = 0.001) -> tuple[Command, ...]:
        self.now += seconds
        self.said = self.controller.handle(event, self.now)
        self.controller.check()
        return self.said

    def expire(self) -> tuple[Command, ...]:
        """The deadline passes; and, where it is put off for those who may not have been heard, the later one."""
        self.look()
        return self.look() if self.controller.next_deadline() == self.now + HEARING_SECONDS else self.said

    def look(self) -> tuple[Command, ...]:
        deadline = self.controller.next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        self.said = self.controller.expire(self.now)
        self.controller.check()
        return self.said

    def wait(self, seconds: float) -> list[Command]:
        """Let time pass; returns what the deadlines on the way led to."""
        until, said = self.now + seconds, list[Command]()
        while (deadline := self.controller.next_deadline()) is not None and deadline <= until:
            said += self.look()
        self.now = until
        return said

    def started(self) -> None:
        for process in list(self.controller.members.processes.values()):
            if process.alive and not process.started:
                self.tell(ev.ProcessStarted(process=process.name, pid=1))

    def enters(self, process: str, rank: int, **changes: object) -> tuple[Command, ...]:
        event = ev.TrainingEntered(
            process=process, rank=rank, version=0, layout_digest="layout", state_digest="v0", until=9
        )
        return self.tell(msgspec.structs.replace(event, **changes))

    def warm(self, process: str, seconds: float = 0.001) -> tuple[Command, ...]:
        return self.tell(ev.StandbyReady(process=process, layout_digest="layout"), seconds)

    def train(self) -> "Desk":
        """Up to Begin, with all standbys warm."""
        self.started()
        for rank, process in self.controller.rank_processes().items():
            self.enters(process, rank)
        for standby in self.controller.members.standbys():
            self.warm(standby.name)
        assert self.controller.stage is Stage.TRAINING
        return self

    def exits(
        self, process: str, status: int | None = -9, *, step: int = 0, evidence: str = "was killed by SIGKILL"
    ) -> tuple[Command, ...]:
        rank = self.controller.members.processes[process].rank
        position = Position(step=step, version=step, phase=Phase.FORWARD, private_versions=(step, -1))
        position = position if rank is not None else Position()
        return self.tell(
            ev.ProcessExited(process=process, exit_status=status, evidence=evidence, position=position, noticed_ns=1)
        )

    def suspect(self, process: str, kind: str = "frozen", step: int = 0) -> tuple[Command, ...]:
        position = Position(step=step, version=step, phase=Phase.FORWARD)
        return self.tell(
            ev.ProcessSuspected(process=process, kind=kind, evidence=f"it is {kind}", position=position, noticed_ns=1)
        )

    def raises(
        self, process: str, summary: str, *, step: int = 0, kind: str = "exception", after_undone: bool = False
    ) -> tuple[Command, ...]:
        return self.tell(
            ev.WorkerFailed(
                process=process,
                rank=self.controller.members.processes[process].rank or 0,
                kind=kind,
                step=step,
                phase="FORWARD",
                summary=summary,
                traceback=f"Traceback ...\n{summary}",
                noticed_ns=1,
                after_undone=after_undone,
            )
        )

    def breaks(self, process: str, step: int = 0) -> tuple[Command, ...]:
        return self.tell(
            ev.CollectiveFailed(
                process=process,
                rank=0,
                generation=self.controller.generation,
                step=step,
                summary="connection reset",
                noticed_ns=1,
            )
        )

    def stands(self, process: str, at: int = 0, **changes: object) -> tuple[Command, ...]:
        held = self.controller.members.processes[process]
        blank = held.replacement
        event = ev.Stopped(
            process=process,
            rank=held.rank or 0,
            generation=self.controller.generation,
            step=at,
            version=0 if blank else at,
            lineage="" if blank else f"lineage {at}",
            prepared=-1,
            torn=False,
            blank=blank,
            stop_seconds=0.0,
            restore_address=process,
        )
        return self.tell(msgspec.structs.replace(event, **changes))

    def restores(self, process: str, at: int = 0, **changes: object) -> tuple[Command, ...]:
        event = ev.Restored(
            process=process,
            rank=self.controller.members.processes[process].rank or 0,
            generation=self.controller.generation,
            version=at,
            lineage=f"lineage {at}",
            state_digest=f"v{at}",
            layout_digest="layout",
            progress=ev.RestoreProgress(),
        )
        return self.tell(msgspec.structs.replace(event, **changes))

    def all_stand(self, version: int = 0) -> tuple[Command, ...]:
        for process in self.controller.rank_processes().values():
            self.stands(process, version)
        return self.said

    def recover(self, version: int = 0, *, commits: bool = True) -> None:
        """From Stop to Resume, with nothing in between, and to the end of the first step."""
        self.all_stand(version)
        for process in self.controller.rank_processes().values():
            self.restores(process, version)
        assert self.controller.stage is Stage.TRAINING, self.said
        said = list(self.said)
        for process in self.controller.rank_processes().values() if commits else ():
            said += self.commits(process, version)
        self.said = tuple(said)

    def commits(self, process: str, step: int) -> tuple[Command, ...]:
        """The first step after a recovery is done."""
        event = ev.StepResumed(
            process=process,
            rank=self.controller.members.processes[process].rank or 0,
            generation=self.controller.generation,
            step=step,
            resumed_ns=1,
            forward_ns=2,
            commit_ns=3,
        )
        return self.tell(event)

    def done(self, process: str, **changes: object) -> tuple[Command, ...]:
        event = ev.TrainingDone(
            process=process,
            rank=self.controller.members.processes[process].rank or 0,
            generation=self.controller.generation,
            version=9,
            lineage="lineage 9",
            state_digest="v9",
            cut_collectives=0,
        )
        return self.tell(msgspec.structs.replace(event, **changes))

    def finish(self) -> "Desk":
        for process in self.controller.rank_processes().values():
            self.done(process)
        assert self.controller.stage is Stage.FINISHING
        return self

    # --- what came of it ----------------------------------------------------------------------------------------
    def end(self) -> EndJob:
        assert self.controller.stage is Stage.ENDED, self.said
        return next(c for c in self.said if isinstance(c, EndJob))


def kinds(commands: Sequence[Command]) -> list[type]:
    return [type(command) for command in commands if not isinstance(command, Notice)]


def one(commands: Sequence[Command], kind: type[Order]) -> Order:
    (found,) = [command for command in commands if isinstance(command, kind)]
    return found


def killed(commands: Sequence[Command]) -> list[str]:
    return [command.process for command in commands if isinstance(command, Kill)]


# --- starting -----------------------------------------------------------------------------------------------------
def test_it_starts_every_rank_and_every_standby() -> None:
    desk = Desk(world_size=2, standbys=2)
    assert [(c.process, c.rank, c.slot) for c in desk.said if isinstance(c, Spawn)] == [
        ("w0", 0, 0),
        ("w1", 1, 1),
        ("w2", None, 2),
        ("w3", None, 3),
    ]


def test_a_rank_is_told_its_generation_once_its_process_lives() -> None:
    desk = Desk(standbys=1)
    assert one(desk.tell(ev.ProcessStarted(process="w1", pid=1)), Assign).rank == 1
    assert desk.tell(ev.ProcessStarted(process="w1", pid=1)) == ()  # a restarted agent says it again
    assert desk.tell(ev.ProcessStarted(process="w2", pid=1)) == ()


def test_training_begins_when_all_ranks_hold_the_same_state() -> None:
    desk = Desk()
    desk.started()
    assert desk.enters("w0", 0) == ()
    begin = one(desk.enters("w1", 1), Begin)
    assert begin.generation == 1
    assert desk.controller.next_deadline() is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layout_digest": "other"}, "rank 1 has other parameters"),
        ({"state_digest": "other"}, "the state of rank 1 (other) differs from that of rank 0 (v0)"),
        ({"version": 3}, "the state of rank 1"),
        ({"until": 10}, "rank 1 wants 10 steps, rank 0 wants 9"),
    ],
)
def test_ranks_that_start_differently_do_not_train(changes: dict[str, object], text: str) -> None:
    desk = Desk()
    desk.started()
    desk.enters("w0", 0)
    desk.enters("w1", 1, **changes)
    assert text in desk.end().error


def test_before_the_first_step_a_death_starts_all_ranks_again() -> None:
    desk = Desk(standbys=1)
    desk.started()
    desk.enters("w0", 0)
    said = desk.exits("w1")
    assert killed(said) == ["w0"]
    assert [(c.process, c.rank) for c in said if isinstance(c, Spawn)] == [("w3", 0), ("w4", 1)]
    desk.enters("w0", 0)  # a word of the old start counts no more
    desk.exits("w0")
    desk.train()
    assert desk.controller.generation == 2
    assert desk.controller.rank_processes() == {0: "w3", 1: "w4"}


def test_a_frozen_rank_before_the_first_step_is_killed_with_the_others() -> None:
    desk = Desk()
    desk.started()
    assert set(killed(desk.suspect("w1"))) == {"w0", "w1"}
    assert desk.controller.rank_processes() == {0: "w2", 1: "w3"}


def test_three_restarts_are_enough() -> None:
    desk = Desk()
    for _ in range(3):
        desk.started()
        desk.exits(desk.controller.rank_processes()[1])
        assert desk.controller.stage is Stage.STARTING
    desk.exits(desk.controller.rank_processes()[1])
    assert desk.end().error == "rank 1 was killed by SIGKILL; 3 starts have failed"


def test_a_script_that_never_takes_a_step_is_told_so() -> None:
    desk = Desk()
    desk.started()
    desk.exits("w0", 0, evidence="exited with status 0")
    assert "rank 0 ended before its first step: the script must call relight.init()" in desk.end().error


def test_an_exception_before_the_first_step_ends_the_job_with_its_traceback() -> None:
    desk = Desk()
    desk.started()
    assert desk.raises("w0", "NameError: modle") == ()
    desk.exits("w0", 1, evidence="exited with status 1")
    assert desk.end().error == "rank 0 failed before its first step: NameError: modle"
    assert desk.end().details == "Traceback ...\nNameError: modle"


def test_an_exit_before_the_first_step_without_a_word() -> None:
    desk = Desk()
    desk.started()
    desk.exits("w1", 2, evidence="exited with status 2")
    assert desk.end().error == "rank 1 exited with status 2 before its first step"


def test_the_start_has_a_deadline_and_names_who_missed_it() -> None:
    desk = Desk(world_size=3)
    desk.started()
    desk.enters("w1", 1)
    desk.expire()
    assert desk.end().error.startswith("rank 0, 2 did not reach its first step within 300 s")


# --- who has failed -----------------------------------------------------------------------------------------------
def test_a_death_opens_a_generation_and_a_standby_takes_the_rank() -> None:
    desk = Desk(standbys=1).train()
    said = desk.exits("w1")
    assert kinds(said) == [Stop, Assign]
    assert one(said, Stop).generation == 2
    assert (one(said, Assign).process, one(said, Assign).rank, one(said, Assign).generation) == ("w2", 1, 2)


def test_a_death_that_is_seen_early_is_explained_later_and_counts_once() -> None:
    desk = Desk(standbys=1).train()
    position = Position(step=3, version=3, phase=Phase.BACKWARD, private_versions=(3, -1))
    dying = ev.ProcessDying(process="w1", position=position, noticed_ns=1)
    assert kinds(desk.tell(dying)) == [Stop, Assign]
    assert desk.tell(dying) == ()
    desk.stands("w0", 3)
    assert kinds(desk.stands("w2", 3)) == [Restore]  # it can run nothing any more: no recovery waits for its memory
    said = desk.exits("w1", step=3)
    assert kinds(said) == []
    assert "was killed by SIGKILL" in said[0].why
    (failure,) = desk.controller.report().failures
    assert (failure.kind, failure.rank, failure.step) == ("killed", 1, 3)


def test_of_many_replicas_some_are_named_as_sources_and_first_those_that_are_near() -> None:
    """An order goes to every rank: naming all of them in it would make it grow with their number, twice."""
    desk = Desk(world_size=100, standbys=1, nodes=10)
    for host in range(1, 10):  # the first has joined
        desk.tell(ev.AgentJoined(agent=f"node-{host}", slots=100))
    desk.train()
    desk.exits("w7")
    members = desk.controller.members.by_rank()
    for process in members.values():
        desk.stands(process.name)
    restore = one(desk.said, Restore)
    named = [source.rank for source in restore.sources]
    assert len(named) == MAX_SOURCES_PER_TARGET
    assert named == sorted(set(named) - {7})
    near = [rank for rank in named if members[rank].agent == members[7].agent]
    assert len(near) == MAX_SOURCES_PER_TARGET // 2
    assert len({members[rank].agent for rank in named}) > 5


def test_a_script_that_exits_early_has_failed() -> None:
    desk = Desk(standbys=1).train()
    assert kinds(desk.exits("w1", 0, evidence="exited with status 0")) == [Stop, Assign]
    assert desk.controller.report().failures[0].kind == "exited"


def test_running_out_of_memory_has_a_name_of_its_own() -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1", evidence="was killed by the kernel's out-of-memory killer")
    assert desk.controller.report().failures[0].kind == "out of memory"


def test_the_dead_and_the_unknown_have_no_say() -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1")
    assert desk.exits("w1") == ()
    assert desk.raises("w1", "ValueError: too late") == ()
    assert desk.suspect("w1") == ()
    desk.recover()
    assert desk.done("w1") == ()
    assert desk.tell(ev.ProcessStarted(process="w99", pid=1)) == ()


def test_a_deadline_that_has_not_passed_changes_nothing() -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1")
    assert desk.controller.expire(desk.now) == ()
    assert desk.controller.stage is Stage.STOPPING


def test_without_a_standby_a_fresh_process_is_started() -> None:
    desk = Desk().train()
    spawn = one(desk.exits("w1"), Spawn)
    assert (spawn.process, spawn.rank) == ("w2", None)
    desk.stands("w0")
    assert kinds(desk.warm("w2", 5.0)) == [Assign]
    assert kinds(desk.stands("w2")) == [Restore]


def test_a_fresh_process_that_does_not_come_gets_company() -> None:
    desk = Desk().train()
    desk.exits("w1")
    desk.stands("w0")
    assert kinds(desk.wait(STANDBY_PATIENCE_SECONDS - 1.0)) == []
    assert kinds(desk.wait(2.0)) == [Spawn]


def test_patience_grows_with_the_slowest_start_of_the_job() -> None:
    desk = Desk()
    desk.now = 100.0
    desk.train()
    desk.exits("w1")
    desk.stands("w0")
    assert kinds(desk.wait(199.0)) == []
    assert kinds(desk.wait(STOP_TIMEOUT_SECONDS + OUTSIDE_SECONDS)) == [Spawn]  # seen at the next deadline


def test_of_two_fresh_processes_the_second_is_not_kept() -> None:
    desk = Desk().train()
    desk.exits("w1")
    desk.stands("w0")
    desk.wait(STANDBY_PATIENCE_SECONDS + 1.0)
    desk.warm("w2")
    desk.stands("w2")
    desk.restores("w0")
    assert killed(desk.restores("w2")) == ["w3"]
    assert one(desk.said, Resume).generation == 2


def test_the_surplus_is_taken_from_those_that_are_not_warm() -> None:
    desk = Desk(standbys=1)
    desk.started()
    for rank in range(2):
        desk.enters(f"w{rank}", rank)
    desk.exits("w1")  # the standby w2 is still starting
    desk.stands("w0")
    desk.wait(2 * STANDBY_PATIENCE_SECONDS + 2.0)  # so w3 and w4 are started
    desk.warm("w3")
    desk.stands("w3")
    desk.warm("w2")
    desk.restores("w0")
    assert killed(desk.restores("w3")) == ["w4"]


def test_a_crash_loop_of_fresh_processes_ends_the_job() -> None:
    desk = Desk().train()
    desk.exits("w1")
    desk.stands("w0")
    for process in ("w2", "w3"):
        desk.raises(process, "ImportError: numpy")
        assert kinds(desk.exits(process, 1, evidence="exited with status 1")) == [Spawn]
    desk.raises("w4", "ImportError: numpy")
    desk.exits("w4", 1, evidence="exited with status 1")
    assert "the script raised the same in 3 processes before one could take rank 1" in desk.end().error
    assert desk.end().details == "Traceback ...\nImportError: numpy"


def test_a_standby_that_raises_the_same_is_replaced_three_times_at_most() -> None:
    desk = Desk(standbys=1).train()
    for process in ("w2", "w3"):
        desk.raises(process, "ImportError: numpy")
        assert kinds(desk.exits(process, 1)) == [Spawn]
    desk.raises("w4", "ImportError: numpy")
    assert kinds(desk.exits("w4", 1)) == []
    assert "no more standbys" in desk.said[-2].why
    assert not desk.controller.report().failures  # no rank has failed
    assert Spawn not in kinds(desk.wait(1000.0))


def test_a_standby_that_waited_long_forgives_those_before_it() -> None:
    desk = Desk(standbys=1).train()
    for process in ("w2", "w3"):
        desk.exits(process)
    desk.warm("w4")
    desk.wait(STANDBY_PROVEN_SECONDS + 1)
    assert Spawn in kinds(desk.exits("w4"))


def test_standbys_that_die_as_soon_as_they_are_warm_are_started_less_and_less_often() -> None:
    desk = Desk(standbys=1).train()
    for process in ("w2", "w3", "w4"):
        desk.warm(process)
        desk.exits(process)
    assert Spawn not in kinds(desk.said)
    assert kinds(desk.wait(1.0)) == [Spawn]


def test_a_standby_that_took_a_rank_forgives_those_before_it() -> None:
    desk = Desk(standbys=1).train()
    for process in ("w2", "w3"):
        desk.exits(process)
    desk.warm("w4")
    desk.exits("w1")
    desk.recover()
    assert kinds(desk.exits("w5")) == [Spawn]


def test_a_frozen_standby_is_killed_and_replaced() -> None:
    desk = Desk(standbys=1).train()
    assert kinds(desk.suspect("w2")) == [Kill, Spawn]
    assert desk.exits("w2") == ()


def test_a_suspect_is_killed_and_its_death_is_awaited() -> None:
    desk = Desk(standbys=1).train()
    assert kinds(desk.suspect("w1")) == [Kill, Stop, Assign]
    desk.stands("w0")
    assert desk.stands("w2") == ()
    assert kinds(desk.exits("w1")) == [Restore]


def test_a_suspicion_counts_once() -> None:
    desk = Desk(standbys=1).train()
    desk.suspect("w1")
    assert desk.suspect("w1") == ()
    desk.exits("w1")
    assert len(desk.controller.report().failures) == 1


def test_an_exception_is_a_failure_of_its_rank() -> None:
    desk = Desk(standbys=1).train()
    assert kinds(desk.raises("w1", "ValueError: 3", step=4)) == [Kill, Stop, Assign]
    assert desk.exits("w1", 1) == ()
    (failure,) = desk.controller.report().failures
    assert (failure.kind, failure.rank, failure.step, failure.phase) == ("exception", 1, 4, "FORWARD")


def test_a_mistake_in_the_use_of_relight_ends_the_job_at_once() -> None:
    desk = Desk(standbys=1).train()
    desk.raises("w1", "UsageError: parameters changed outside the step", kind="usage")
    assert desk.end().error == "rank 1: UsageError: parameters changed outside the step"


def test_a_broken_collective_waits_for_the_death_that_explains_it() -> None:
    desk = Desk(standbys=1).train()
    assert desk.breaks("w0") == ()
    assert kinds(desk.exits("w1")) == [Stop, Assign]
    desk.stands("w0")
    desk.stands("w2")
    desk.restores("w0")
    desk.restores("w2")
    assert len(desk.controller.report().failures) == 1
    assert desk.controller.next_deadline() is None


def test_a_broken_collective_without_a_death_forms_a_new_group() -> None:
    desk = Desk().train()
    desk.breaks("w0")
    desk.breaks("w1")
    began = desk.now
    assert kinds(desk.expire()) == [Stop]
    assert desk.now - began <= COLLECTIVE_GRACE_SECONDS
    desk.recover()
    (failure,) = desk.controller.report().failures
    assert (failure.kind, failure.rank) == ("communication", -1)


def test_a_network_that_breaks_at_one_step_again_and_again_ends_the_job() -> None:
    desk = Desk().train()
    for _ in range(4):
        desk.breaks("w0", step=2)
        desk.expire()
        desk.recover(2)
    desk.breaks("w0", step=2)
    desk.expire()
    assert "5 times in the same place" in desk.end().error


def test_a_collective_of_an_older_generation_breaks_nothing() -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1")
    desk.recover()
    late = ev.CollectiveFailed(process="w0", rank=0, generation=1, step=0, summary="reset", noticed_ns=1)
    assert desk.tell(late) == ()
    assert desk.controller.next_deadline() is None


def test_a_stall_makes_everyone_stop_and_blames_nobody() -> None:
    desk = Desk().train()
    stall = ev.CommunicationStalled(evidence="no rank made progress for 30 s", step=4, noticed_ns=1)
    assert kinds(desk.tell(stall)) == [Stop]
    assert desk.tell(stall) == ()  # once is enough
    desk.recover(4)
    assert desk.controller.report().failures[0].rank == -1


def test_stalls_at_different_steps_are_not_one_bug() -> None:
    desk = Desk().train()
    for step in (4, 5, 6):
        desk.tell(ev.CommunicationStalled(evidence="no rank made progress", step=step, noticed_ns=1))
        desk.recover(step)
    desk.tell(ev.CommunicationStalled(evidence="no rank made progress", step=6, noticed_ns=1))
    assert "2 times in the same place" in desk.end().error


# --- when it gives up ---------------------------------------------------------------------------------------------
def test_the_same_exception_at_the_same_step_is_a_bug() -> None:
    desk = Desk(standbys=1).train()
    desk.raises("w1", "ValueError: 3", step=4)
    desk.exits("w1", 1, step=4)
    desk.recover(4)
    desk.raises("w2", "ValueError: 3", step=4)
    assert "rank 1 in FORWARD of step 4: ValueError: 3 (2 times in the same place" in desk.end().error
    assert desk.end().details == "Traceback ...\nValueError: 3"


@pytest.mark.parametrize(("summary", "step"), [("ValueError: 4", 4), ("ValueError: 3", 5)])
def test_another_exception_or_another_step_is_not(summary: str, step: int) -> None:
    desk = Desk(standbys=1).train()
    desk.raises("w1", "ValueError: 3", step=4)
    desk.exits("w1", 1, step=4)
    desk.recover(4)
    desk.warm("w3")
    assert kinds(desk.raises("w2", summary, step=step)) == [Kill, Stop, Assign]


def test_exceptions_of_code_after_an_undone_attempt_are_not_alike_but_count() -> None:
    desk = Desk(standbys=1).train()
    for number in range(10):
        process = desk.controller.rank_processes()[1]
        desk.raises(process, "TypeError: None", step=4, after_undone=True)
        desk.exits(process, 1, step=4)
        desk.recover(4)
        assert desk.controller.stage is Stage.TRAINING, number
        desk.warm(desk.controller.members.standbys()[0].name)
    desk.raises(desk.controller.rank_processes()[1], "TypeError: None", step=4, after_undone=True)
    assert "step 4 failed 11 times" in desk.end().error


def test_the_same_hang_twice_is_a_bug_and_the_same_freeze_is_not() -> None:
    desk = Desk(standbys=1).train()
    for kind, end in (("frozen", False), ("hang", False), ("frozen", False), ("hang", True)):
        process = desk.controller.rank_processes()[1]
        desk.suspect(process, kind, step=4)
        assert (desk.controller.stage is Stage.ENDED) is end
        if not end:
            desk.exits(process, step=4)
            desk.recover(4)
            desk.warm(desk.controller.members.standbys()[0].name)
    assert "2 times in the same place" in desk.end().error


@pytest.mark.parametrize("seen_dying", [False, True])
def test_the_same_exit_twice_is_a_bug(seen_dying: bool) -> None:
    desk = Desk(standbys=1).train()
    for _ in range(2):
        process = desk.controller.rank_processes()[1]
        if seen_dying:
            position = Position(step=4, version=4, private_versions=(4, -1))
            desk.tell(ev.ProcessDying(process=process, position=position, noticed_ns=1))
        desk.exits(process, 1, step=4, evidence="exited with status 1")
        if desk.controller.stage is not Stage.ENDED:
            desk.recover(4)
            desk.warm(desk.controller.members.standbys()[0].name)
    assert "exited with status 1 (2 times in the same place" in desk.end().error


@pytest.mark.parametrize("seen_dying", [False, True])
def test_aborts_of_any_ranks_at_one_step_are_a_bug_and_other_signals_are_none(seen_dying: bool) -> None:
    desk = Desk(standbys=1).train()
    for number in range(10):
        aborts = number % 2 == 1
        process = desk.controller.rank_processes()[number // 2 % 2]
        if seen_dying:
            position = Position(step=4, version=4, private_versions=(4, -1))
            desk.tell(ev.ProcessDying(process=process, position=position, noticed_ns=1))
        evidence = "was killed by SIGABRT" if aborts else "was killed by SIGKILL"
        desk.exits(process, -6 if aborts else -9, step=4, evidence=evidence)
        assert (desk.controller.stage is Stage.ENDED) is (number == 9)
        if number < 9:
            desk.recover(4)
            desk.warm(desk.controller.members.standbys()[0].name)
    assert "was killed by SIGABRT (5 times in the same place" in desk.end().error


def test_replacements_that_exit_alike_in_two_recoveries_are_no_bug() -> None:
    """A replacement's page says step 0 until it is restored, whatever the step that it dies for (found by the soak)."""
    desk = Desk(world_size=3, standbys=2).train()
    for step in (4, 7):
        desk.exits(desk.controller.rank_processes()[1], step=step)
        replacement = desk.controller.rank_processes()[1]
        desk.tell(ev.ProcessDying(process=replacement, position=Position(), noticed_ns=1))
        desk.exits(replacement, 0, evidence="exited with code 0")
        assert desk.controller.stage is not Stage.ENDED, desk.said
        desk.recover(step)
        for standby in desk.controller.members.standbys():
            desk.warm(standby.name)


def test_max_failures() -> None:
    desk = Desk(standbys=1, max_failures=1).train()
    desk.exits("w1")
    desk.recover()
    desk.warm("w3")
    desk.exits("w2", step=3)
    assert "2 failures, more than --max-failures 1" in desk.end().error


def test_max_failures_zero_gives_up_at_the_first() -> None:
    desk = Desk(standbys=1, max_failures=0).train()
    desk.exits("w1")
    assert "1 failures, more than --max-failures 0" in desk.end().error


def test_a_step_may_fail_only_so_often() -> None:
    desk = Desk(standbys=1, max_failures_per_step=2).train()
    for count in range(3):
        desk.exits(desk.controller.rank_processes()[1], step=4)
        if count < 2:
            desk.recover(4)
            desk.warm(desk.controller.members.standbys()[0].name)
    assert desk.end().error.startswith("step 4 failed 3 times; last: rank 1 in FORWARD of step 4")


def test_a_replacement_that_dies_before_it_is_restored_dies_for_the_recovery_s_step() -> None:
    """Its page says step 0; a job of weeks would end over ten such deaths, all counted there."""
    desk = Desk(standbys=3, max_failures_per_step=2).train()
    for version in (10, 20, 30, 40):
        desk.exits(desk.controller.rank_processes()[1], step=version)
        desk.exits(desk.controller.rank_processes()[1], 1, evidence="exited with status 1")
        desk.recover(version)
        for standby in desk.controller.members.standbys():
            desk.warm(standby.name)
    assert desk.controller.stage is Stage.TRAINING


def test_shutdown() -> None:
    desk = Desk().train()
    desk.tell(ev.ShutdownRequested(reason="Ctrl-C"))
    assert desk.end().error == "stopped: Ctrl-C"
    assert desk.exits("w0") == ()  # over is over
    assert desk.controller.next_deadline() is None


def test_the_loss_of_the_only_agent_is_the_loss_of_everything() -> None:
    desk = Desk().train()
    assert desk.tell(ev.AgentLost(agent="node-9", evidence="gone")) == ()
    desk.tell(ev.AgentLost(agent="node-0", evidence="no connection for 15 s"))
    assert "the agent of the only node is gone (no connection for 15 s)" in desk.end().error


def test_an_agent_that_comes_back_is_told_again_what_holds() -> None:
    """Orders that it had not passed on when it died are lost; a worker that has one already ignores it."""
    desk = Desk(world_size=3, standbys=1)
    desk.started()
    first = desk.tell(ev.AgentJoined(agent="node-0", slots=3))
    assert [(type(order), order.process) for order in first if isinstance(order, Assign)] == [
        (Assign, name) for name in ("w0", "w1", "w2")
    ]
    (begin,) = desk.train().tell(ev.AgentJoined(agent="node-0", slots=3))
    assert isinstance(begin, Begin)
    desk.suspect("w1")  # killed, and not known to be dead yet
    stop = next(order for order in desk.said if isinstance(order, Stop))
    assert desk.controller.rank_processes()[1] == "w3"
    kill, assign, again = desk.tell(ev.AgentJoined(agent="node-0", slots=3))
    assert isinstance(kill, Kill)
    assert kill.process == "w1"
    assert isinstance(assign, Assign)
    assert (assign.process, assign.rank, assign.generation) == ("w3", 1, 2)
    assert again == stop


def test_all_ranks_dead() -> None:
    desk = Desk(standbys=2).train()
    desk.exits("w1")
    desk.exits("w0")
    assert desk.end().error.startswith("every replica of the state is lost; last: rank 0 in FORWARD of step 0")


# --- a recovery ---------------------------------------------------------------------------------------------------
def test_nothing_is_decided_before_all_are_paused() -> None:
    desk = Desk(world_size=3, standbys=1).train()
    desk.exits("w1")
    assert desk.stands("w0") == ()
    assert desk.stands("w3") == ()
    assert desk.stands("w0") == ()  # said twice
    assert kinds(desk.stands("w2")) == [Restore]


def test_the_decision_is_sent_with_sources_and_targets() -> None:
    desk = Desk(world_size=3, standbys=1).train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    desk.stands("w2", 4, restore_endpoint="10.0.0.2:7001")
    restore = one(desk.stands("w3", 4), Restore)
    assert (restore.target, restore.targets, restore.generation) == (4, (1,), 2)
    assert [(s.rank, s.address, s.endpoint) for s in restore.sources] == [(0, "w0", ""), (2, "w2", "10.0.0.2:7001")]
    assert restore.why.startswith("back to version 4: ")


def test_attempts_are_counted_by_step() -> None:
    desk = Desk(standbys=1).train()
    for expected in (1, 2):
        desk.exits(desk.controller.rank_processes()[1], step=4)
        assert one(desk.all_stand(4), Restore).attempt == expected
        for process in desk.controller.rank_processes().values():
            desk.restores(process, 4)
        for process in desk.controller.rank_processes().values():
            desk.commits(process, 4)
        desk.warm(desk.controller.members.standbys()[0].name)


def test_reports_of_an_older_generation_count_for_nothing() -> None:
    desk = Desk(world_size=3, standbys=2).train()
    desk.exits("w1")
    desk.exits("w2")
    assert desk.controller.generation == 3
    for process in ("w0", "w3", "w4"):
        assert desk.stands(process, generation=2) == ()
    desk.all_stand()
    assert desk.controller.stage is Stage.RESTORING
    for process in ("w0", "w3", "w4"):
        assert desk.restores(process, generation=2) == ()
    assert desk.controller.stage is Stage.RESTORING


def test_a_process_without_a_rank_has_no_say() -> None:
    desk = Desk(standbys=2).train()
    desk.exits("w1")
    stranger = {"rank": 1, "blank": False}
    assert desk.stands("w3", **stranger) == ()
    assert desk.stands("w1", **stranger) == ()
    desk.stands("w0")
    assert desk.controller.stage is Stage.STOPPING


@pytest.mark.parametrize("stage", [Stage.STOPPING, Stage.RESTORING])
def test_a_failure_during_a_recovery_starts_it_again(stage: Stage) -> None:
    desk = Desk(world_size=3, standbys=2).train()
    desk.exits("w1")
    if stage is Stage.RESTORING:
        desk.all_stand()
        desk.restores("w3")
    said = desk.exits("w2")
    assert one(said, Stop).generation == 3
    assert one(said, Assign).rank == 2
    desk.recover()
    (recovery,) = desk.controller.report().recoveries
    assert (recovery.failures, recovery.restarts, recovery.generation) == ((1, 2), 1, 3)


def test_training_goes_on_when_all_hold_the_target() -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1")
    desk.all_stand()
    assert desk.restores("w0") == ()
    said = desk.restores("w2")
    assert kinds(said) == [Resume]


def test_a_new_standby_starts_when_the_interrupted_step_is_done() -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1")
    desk.all_stand()
    desk.restores("w0")
    desk.restores("w2")
    assert desk.commits("w0", 0) == ()
    assert one(desk.commits("w2", 0), Spawn).rank is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 1}, "rank 1 is at version 1 after a restore to 0"),
        ({"lineage": "x"}, "lineage of rank 1 is x, of rank 0 lineage 0"),
        ({"state_digest": "x"}, "state digest of rank 1 is x, of rank 0 v0"),
        ({"layout_digest": "x"}, "layout digest of rank 1 is x"),
    ],
)
def test_replicas_that_differ_after_a_restore_do_not_train(changes: dict[str, object], text: str) -> None:
    desk = Desk(standbys=1).train()
    desk.exits("w1")
    desk.all_stand()
    desk.restores("w0")
    desk.restores("w2", 0, **changes)
    assert text in desk.end().error


def test_a_halt_of_the_rule_ends_the_job() -> None:
    desk = Desk(world_size=3, standbys=1).train()
    desk.exits("w1", step=4)
    desk.stands("w0", 4)
    desk.stands("w3")
    desk.stands("w2", 7)
    assert desk.end().error.startswith("rank 2 is at version 7 while another is at 4")
    assert "Resume from your last checkpoint, if you keep your own: relight kept none" in desk.end().error


def test_a_restored_replacement_is_a_replica() -> None:
    desk = Desk(standbys=2).train()
    desk.exits("w1")
    desk.all_stand()
    desk.restores("w2")
    said = desk.exits("w0")
    assert kinds(said) == [Stop, Assign]
    desk.stands("w2", blank=False, lineage="lineage 0")
    assert one(desk.stands("w3"), Restore).targets == (0,)


def test_whether_a_replacement_was_restored_is_for_itself_to_say() -> None:
    """Its report may be on its way when the last survivor dies; if it has nothing after all, that is the end."""
    desk = Desk(standbys=2).train()
    desk.exits("w1")
    desk.all_stand()
    desk.exits("w0")
    assert desk.controller.stage is Stage.STOPPING
    desk.stands("w2")
    desk.stands("w3")
    assert "no intact replica is left" in desk.end().error


def test_a_failed_restore_is_most_often_the_echo_of_a_death() -> None:
    desk = Desk(world_size=3, standbys=2).train()
    desk.exits("w1")
    desk.all_stand()
    failed = ev.RestoreFailed(process="w3", generation=2, evidence="the source ended")
    assert desk.tell(failed) == ()
    assert one(desk.exits("w0"), Stop).generation == 3
    assert len(desk.controller.report().failures) == 2


def test_nobody_is_blamed_for_a_restore_that_does_not_end_but_who_then_does_not_stop() -> None:
    """With one rank hung no rank can form the group, so none reports: all are late, and one is to blame."""
    desk = Desk(world_size=3, standbys=2).train()
    desk.exits("w1")
    desk.all_stand()
    said = desk.wait(RESTORE_TIMEOUT_SECONDS)
    assert kinds(said) == [Stop]
    desk.stands("w0")
    desk.stands("w3")
    assert killed(desk.wait(STOP_TIMEOUT_SECONDS + HEARING_SECONDS + 0.1)) == ["w2"]
    desk.exits("w2")
    assert desk.controller.rank_processes() == {0: "w0", 1: "w3", 2: "w4"}


def test_a_survivor_that_does_not_stop_has_failed() -> None:
    desk = Desk(world_size=3, standbys=2).train()
    desk.exits("w1")
    desk.stands("w3")
    desk.stands("w0")
    said = desk.wait(STOP_TIMEOUT_SECONDS + OUTSIDE_SECONDS + HEARING_SECONDS + 0.1)
    assert killed(said) == ["w2"]
    assert one(said, Stop).generation == 3


def test_both_that_do_not_stop_are_in_the_report() -> None:
    desk = Desk(world_size=4, standbys=3).train()
    desk.exits("w1")
    desk.stands("w4")
    desk.stands("w0")
    assert killed(desk.wait(STOP_TIMEOUT_SECONDS + OUTSIDE_SECONDS + HEARING_SECONDS + 0.1)) == ["w2", "w3"]
    desk.exits("w2")
    desk.exits("w3")
    desk.recover()
    (recovery,) = desk.controller.report().recoveries
    assert recovery.failures == (1, 2, 3)


def test_a_replacement_has_its_own_time_to_pause() -> None:
    limit = STOP_TIMEOUT_SECONDS + OUTSIDE_SECONDS + HEARING_SECONDS
    desk = Desk().train()
    desk.exits("w1")
    desk.stands("w0")
    desk.wait(limit - 1.5)
    desk.warm("w2")
    assert killed(desk.wait(limit - 1.0)) == []
    assert killed(desk.wait(1.1)) == ["w2"]


@pytest.mark.parametrize("asked_at", [0.1 * k for k in range(1, 60, 7)])
def test_the_stop_deadline_passes_only_once(asked_at: float) -> None:
    """It was computed as a sum and compared as a difference, which floating point does not take for the same."""
    desk = Desk(world_size=3, standbys=1).train()
    desk.now = 103.0 + asked_at
    desk.exits("w1")
    desk.stands("w0")
    desk.stands("w3")
    expired = 0
    while desk.controller.stage is Stage.STOPPING and not killed(desk.said):
        desk.expire()
        expired += 1
        assert expired < 10


# --- the end ------------------------------------------------------------------------------------------------------
def test_training_is_done_when_every_rank_is() -> None:
    desk = Desk(standbys=1).train()
    assert desk.done("w0") == ()
    said = desk.done("w1")
    assert tuple(kinds(said)) == (Release, Kill)
    assert killed(said) == ["w2"]
    assert desk.exits("w2") == ()
    assert desk.exits("w0", 0) == ()
    desk.exits("w1", 0)
    assert desk.end().error == ""
    report = desk.controller.report()
    assert (report.final_version, report.final_lineage, report.final_state_digest) == (9, "lineage 9", "v9")


@pytest.mark.parametrize("changes", [{"state_digest": "x"}, {"lineage": "x"}, {"version": 8}])
def test_ranks_that_end_differently_are_no_success(changes: dict[str, object]) -> None:
    desk = Desk().train()
    desk.done("w0")
    desk.done("w1", **changes)
    assert "rank 1" in desk.end().error


def test_done_counts_only_in_its_generation() -> None:
    desk = Desk(standbys=1).train()
    desk.done("w0")
    desk.exits("w1", step=9)
    desk.recover(9)
    assert desk.done("w0", generation=1) == ()
    assert desk.done("w2") == ()
    assert kinds(desk.done("w0"))[0] is Release


def test_a_rank_that_fails_after_training() -> None:
    desk = Desk().train().finish()
    desk.raises("w1", "OSError: disk full")
    desk.exits("w1", 1, evidence="exited with status 1")
    error = "training finished, but rank 1 failed in the code after the last step: OSError: disk full"
    assert desk.end().error == error
    assert desk.end().details == "Traceback ...\nOSError: disk full"


def test_a_rank_that_freezes_after_training_is_killed() -> None:
    desk = Desk().train().finish()
    desk.exits("w0", 0)
    assert killed(desk.suspect("w1")) == ["w1"]
    desk.exits("w1")
    assert desk.end().error.startswith("training finished, but rank 1 failed")


def test_a_replaced_process_that_is_still_dying_is_awaited_at_the_end() -> None:
    desk = Desk(standbys=1).train()
    desk.tell(ev.ProcessDying(process="w1", position=Position(private_versions=(0, -1)), noticed_ns=1))
    desk.recover()
    desk.finish()
    for process in ("w0", "w2", "w3"):
        desk.exits(process, 0 if process != "w3" else -9)
    assert desk.controller.stage is Stage.FINISHING
    desk.exits("w1")
    assert desk.end().error == ""


def test_what_a_worker_wants_people_to_read() -> None:
    desk = Desk().train()
    said = desk.tell(ev.WorkerNotice(process="w0", rank=0, text="the loss is NaN"))
    assert [(type(c), c.why) for c in said] == [(Notice, "the loss is NaN")]
    assert desk.controller.report().notices == ("the loss is NaN",)


def test_a_deadline_that_passed_while_the_controller_slept_is_put_off_once() -> None:
    """The answers that it waits for may lie in its sockets."""
    desk = Desk(world_size=2, standbys=1).train()
    desk.exits("w1")
    deadline = desk.controller.next_deadline()
    assert deadline is not None
    desk.now = deadline + 40.0
    assert desk.controller.expire(desk.now) == ()
    put_off = desk.controller.next_deadline()
    assert put_off is not None
    assert desk.now < put_off <= desk.now + 2.0
    assert isinstance(desk.controller.expire(put_off + 40.0)[0], Kill)


def test_a_controller_that_slept_until_just_after_a_deadline_hears_the_answers_first() -> None:
    desk = Desk(world_size=3, standbys=1).train()
    desk.exits("w1")
    desk.stands("w3")
    desk.stands("w0")
    assert desk.look() == ()
    desk.stands("w2")
    assert desk.controller.stage is Stage.RESTORING
    assert killed(desk.wait(HEARING_SECONDS)) == []


# --- divided state ------------------------------------------------------------------------------------------------
DIVIDED = ("shard 1/2", "shard 2/2", "shard 1/2", "shard 2/2")


def divided(standbys: int = 2) -> Desk:
    """Four ranks, two parts of the state with two holders each, in training."""
    desk = Desk(world_size=4, standbys=standbys)
    desk.started()
    for rank, part in enumerate(DIVIDED):
        desk.enters(f"w{rank}", rank, shard=part, state_digest=f"v0 of {part}", state_bytes=2**20)
    said = desk.said
    for standby in desk.controller.members.standbys():
        desk.warm(standby.name)
    assert desk.controller.stage is Stage.TRAINING
    desk.said = said
    return desk


def test_what_a_divided_state_survives_is_said_before_the_first_step() -> None:
    desk = divided()
    kinds = [type(command) for command in desk.said]
    assert kinds.index(Begin) > kinds.index(Notice)
    lines = [command.why for command in desk.said if isinstance(command, Notice)]
    assert "  losing two devices: survived in 4 of 6 cases, not if it is ranks 0 and 2; ranks 1 and 3" in lines
    assert desk.controller.coverage is not None
    assert [part.ranks for part in desk.controller.coverage.parts] == [(0, 2), (1, 3)]


def test_nothing_is_said_of_plain_replication() -> None:
    desk = Desk().train()
    assert desk.controller.coverage is None


def test_holders_of_one_part_must_start_alike() -> None:
    desk = Desk(world_size=4)
    desk.started()
    for rank, part in enumerate(DIVIDED):
        desk.enters(f"w{rank}", rank, shard=part, state_digest="other" if rank == 3 else f"v0 of {part}")
    assert "the state of rank 3 (other) differs from that of rank 1" in desk.end().error
    assert "both hold part shard 2/2" in desk.end().error


def test_only_holders_of_one_part_must_have_built_the_same() -> None:
    """Stages of a pipeline are different modules."""
    desk = Desk(world_size=4)
    desk.started()
    for rank, part in enumerate(DIVIDED):
        desk.enters(f"w{rank}", rank, shard=part, state_digest=f"v0 of {part}", layout_digest=f"layout of {part}")
    assert desk.controller.stage is Stage.TRAINING

    desk = Desk(world_size=4)
    desk.started()
    for rank, part in enumerate(DIVIDED):
        desk.enters(f"w{rank}", rank, shard=part, layout_digest="other" if rank == 3 else f"layout of {part}")
    assert "rank 3 has other parameters or optimizer settings than rank 1" in desk.end().error


def test_a_replacement_copies_from_holders_of_its_part() -> None:
    desk = divided()
    desk.exits("w1")
    restore = one(desk.all_stand(), Restore)
    assert restore.targets == (1,)
    assert [(source.rank, source.shard) for source in restore.sources] == [(3, "shard 2/2")]
    for rank, process in desk.controller.rank_processes().items():
        desk.restores(process, state_digest=f"v0 of {DIVIDED[rank]}")
    assert desk.controller.stage is Stage.TRAINING


def test_restored_holders_of_one_part_must_agree() -> None:
    desk = divided()
    desk.exits("w1")
    desk.all_stand()
    for rank, process in desk.controller.rank_processes().items():
        desk.restores(process, state_digest="wrong" if rank == 1 else f"v0 of {DIVIDED[rank]}")
    assert "state digest of rank 3 is v0 of shard 2/2, of rank 1 wrong" in desk.end().error


def test_restored_holders_of_one_part_must_have_built_the_same() -> None:
    desk = divided()
    desk.exits("w1")
    desk.all_stand()
    for rank, process in desk.controller.rank_processes().items():
        layout = "other" if rank == 1 else f"layout of {DIVIDED[rank]}"
        desk.restores(process, state_digest=f"v0 of {DIVIDED[rank]}", layout_digest=layout)
    assert "layout digest of rank 3 is layout of shard 2/2, of rank 1 other" in desk.end().error


def test_all_copies_of_one_part_lost_end_the_job_at_once() -> None:
    desk = divided()
    desk.exits("w1")
    desk.exits("w3")
    error = desk.end().error
    assert "part shard 2/2 of the state, held by ranks 1, 3 only: every copy is lost" in error
    assert "Resume from your last checkpoint" in error


def test_two_losses_in_different_parts_are_survived() -> None:
    desk = divided()
    desk.exits("w1")
    desk.exits("w2")
    assert one(desk.all_stand(), Restore).targets == (1, 2)


def test_a_source_lost_while_it_is_the_only_holder_ends_the_job() -> None:
    """Its replacement-to-be was told to restore, so only its report says that it holds nothing."""
    desk = divided()
    desk.exits("w1")
    desk.all_stand()
    desk.exits("w3")
    assert desk.controller.stage is Stage.STOPPING
    desk.all_stand()
    assert "part shard 2/2 of the state" in desk.end().error


def test_the_final_states_of_one_part_must_agree() -> None:
    for wrong in (None, 2):
        desk = divided(standbys=0)
        for rank, part in enumerate(DIVIDED):
            desk.done(f"w{rank}", state_digest="wrong" if rank == wrong else f"v9 of {part}")
        if wrong is None:
            assert desk.controller.stage is Stage.FINISHING
        else:
            assert "the state of version 9 differs between rank 0; rank 2" in desk.end().error


def test_holders_of_one_part_vote_on_it_alone() -> None:
    """Three replicas of two parts: one wrong copy is outvoted by two, whatever the other part's holders hold."""
    desk = Desk(world_size=6, standbys=1)
    desk.started()
    parts = [f"shard {rank % 2 + 1}/2" for rank in range(6)]
    for rank, part in enumerate(parts):
        desk.enters(f"w{rank}", rank, shard=part, state_digest=f"v0 of {part}")
    desk.warm("w6")
    alike = tuple(100 * (rank % 2) for rank in range(6))
    event = ev.StateDiffers(process="w0", rank=0, generation=1, step=4, digests=alike, noticed_ns=1)
    assert desk.tell(event) == ()  # two parts are not alike, and need not be
    event = msgspec.structs.replace(event, digests=(*alike[:3], 101, *alike[4:]))
    said = desk.tell(event)
    assert killed(said) == ["w3"]
    assert "not that of the other 2 ranks" in desk.controller.report().failures[0].evidence
    desk.exits("w3", step=4)
    assert [source.rank for source in one(desk.all_stand(4), Restore).sources] == [1, 5]


# --- slow ranks ---------------------------------------------------------------------------------------------------
SLOW = "its own work takes 160 ms a step"


def test_a_slow_rank_is_told_of_once_and_goes_on() -> None:
    desk = Desk(standbys=1).train()
    (notice,) = desk.tell(ev.RankSlow(process="w1", evidence=SLOW))
    assert isinstance(notice, Notice)
    assert notice.why == f"rank 1 is slow, and all others wait for it: {SLOW}"
    assert desk.tell(ev.RankSlow(process="w1", evidence=SLOW)) == ()
    assert desk.controller.report().notices == (notice.why,)


def test_if_asked_a_warm_standby_takes_a_slow_rank_between_two_steps() -> None:
    desk = Desk(standbys=1, replace_slow=True).train()
    notice, order = desk.tell(ev.RankSlow(process="w1", evidence=SLOW))
    assert isinstance(notice, Notice)
    assert isinstance(order, Kill)
    assert (order.process, order.after_step) == ("w1", True)
    assert desk.tell(ev.RankSlow(process="w1", evidence=SLOW)) == ()  # it is on its way
    said = desk.tell(ev.ProcessDying(process="w1", position=Position(step=7, phase=Phase.OUTSIDE), noticed_ns=1))
    assert [command.rank for command in said if isinstance(command, Assign)] == [1]
    (failure,) = desk.controller.report().failures
    assert (failure.kind, failure.rank, failure.evidence) == ("slow", 1, SLOW)


def test_a_slow_rank_is_replaced_once_somebody_is_warm() -> None:
    desk = Desk(replace_slow=True).train()
    assert tuple(map(type, desk.tell(ev.RankSlow(process="w1", evidence=SLOW)))) == (Notice,)
    desk = Desk(standbys=1, replace_slow=True).train()
    desk.exits("w2")  # its successor is not warm yet
    assert tuple(map(type, desk.tell(ev.RankSlow(process="w1", evidence=SLOW)))) == (Notice,)
    desk.warm("w3")
    assert tuple(map(type, desk.tell(ev.RankSlow(process="w1", evidence=SLOW)))) == (Kill,)


def test_a_slow_rank_is_asked_again_if_its_agent_may_have_died_with_the_order() -> None:
    desk = Desk(standbys=1, replace_slow=True).train()
    _, asked = desk.tell(ev.RankSlow(process="w1", evidence=SLOW))
    for event in (ev.AgentJoined(agent="node-0", slots=2), ev.ControllerRestarted()):
        assert [order for order in desk.tell(event) if isinstance(order, Kill)] == [asked]


def test_who_alone_holds_a_part_of_the_state_stays_however_slow() -> None:
    desk = Desk(world_size=1, standbys=1, replace_slow=True).train()
    assert tuple(map(type, desk.tell(ev.RankSlow(process="w0", evidence=SLOW)))) == (Notice,)


# --- told to end --------------------------------------------------------------------------------------------------
TERM = ev.ShutdownRequested(reason="SIGTERM", after_step=True)


def keeping_checkpoints(standbys: int = 0) -> Desk:
    desk = Desk(standbys=standbys)
    desk.started()
    for rank, process in desk.controller.rank_processes().items():
        desk.enters(process, rank, checkpoint_every=10)
    for standby in desk.controller.members.standbys():
        desk.warm(standby.name)
    return desk


def test_a_job_with_checkpoints_ends_after_a_step_that_all_ranks_finish() -> None:
    desk = keeping_checkpoints()
    assert tuple(map(type, desk.tell(TERM))) == (Notice, WindDown)
    assert desk.tell(TERM) == ()  # another host says it too
    for process in ("w0", "w1"):
        desk.done(process, version=1, lineage="lineage 1")
    desk.exits("w0", 0)
    (end,) = desk.exits("w1", 0)
    assert isinstance(end, EndJob)
    assert end.error.startswith("stopped: SIGTERM, after 1 of 9 steps. Start the same command again")


def test_after_a_recovery_it_is_said_again() -> None:
    desk = keeping_checkpoints(standbys=1)
    desk.tell(TERM)
    desk.exits("w1")
    desk.all_stand(0)
    said = [order for process in ("w0", "w2") for order in desk.restores(process, 0)]
    assert [type(order) for order in said if isinstance(order, Resume | WindDown)] == [Resume, WindDown]


def test_without_checkpoints_or_asked_twice_it_ends_at_once() -> None:
    assert [type(order) for order in Desk().train().tell(TERM)] == [EndJob]
    desk = keeping_checkpoints()
    desk.tell(TERM)
    assert [type(order) for order in desk.tell(ev.ShutdownRequested(reason="SIGINT"))] == [EndJob]


@pytest.mark.parametrize("until", [60, 30])
def test_a_finished_job_that_is_started_again_says_so(until: int) -> None:
    desk = Desk(world_size=2)
    desk.started()
    said = [
        command
        for rank, process in desk.controller.rank_processes().items()
        for command in desk.enters(process, rank, version=60, until=until)
    ]
    assert [command.why for command in said if isinstance(command, Notice)] == [
        f"nothing left to do: the checkpoint is at step 60, and the script wants {until}"
    ]
    assert desk.controller.report().began_at == 60
