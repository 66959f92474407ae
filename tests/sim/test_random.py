"""Thousands of jobs in virtual time: the production controller and detector, and everything that can go wrong.

A failing test prints its seed. To look at it: `python -m relight.sim --seed N`, with `--shrink` for a smaller one.
"""

from collections import Counter
from typing import ClassVar

import pytest

from relight.core.protocol.commands import FallbackTier, Restore, Save
from relight.core.protocol.events import AgentJoined, AgentLost
from relight.core.protocol.fault import Action
from relight.sim.model.contents import Violation
from relight.sim.model.fallback_tiers import FallbackTiers
from relight.sim.model.schedule import (
    ACTIONS,
    ProcessFault,
    Schedule,
    decode_schedule,
    encode_schedule,
    random_schedule,
    schedule_of,
)
from relight.sim.model.worker.points import OTHER_POINTS, RECOVERY_POINTS, STEP_POINTS
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.search.swarm import search, try_seed
from relight.sim.timed.job import Parts, SimulatedJob, run_schedule

BLOCK = 200


def run(schedule: Schedule, name: object) -> SimulatedJob:
    job = SimulatedJob(schedule)
    try:
        job.run()
    except Violation as violation:
        pytest.fail(f"{name}: {violation}", pytrace=False)
    return job


def run_block(first: int, count: int, **limits: object) -> None:
    for seed in range(first, first + count):
        run(random_schedule(seed, **limits), f"seed {seed} {limits}")  # type: ignore[arg-type]


def test_random_schedules() -> None:
    found = search(10_000, 400)  # `.ci/run` searches for a minute; those from 0 on: see below, what they reach
    print(f"{found.schedules} schedules, {found.per_second:.0f} a second")
    assert found.schedules == 400
    assert not found.violations


def test_a_host_that_was_given_up_does_not_join_a_second_time_through_what_is_said_again() -> None:
    """Once the simulator's own fault: a new controller was told of the agent's first coming, and put a rank there."""
    found = (
        '{"seed":0,"world_size":2,"until":1,"faults":[{"action":"loop","nth":1,"point":"BARRIER"}],"network":'
        '[{"kind":"controller","nth":36,"seconds":0.001,"sent":1,"repeated":2},{"kind":"join","nth":12,'
        '"seconds":0.001,"host":2},{"kind":"host","nth":12,"seconds":0.001,"up":false,"host":3}],'
        '"repeated_messages":0.0,"seen_dying":0.0}'
    )
    job = run(decode_schedule(found), "the schedule that was found")
    lost = [entry.now for entry in job.journal if isinstance(entry.event, AgentLost)]
    joined = [entry.now for entry in job.journal if isinstance(entry.event, AgentJoined)]
    assert len(lost) == 1
    assert max(joined) < lost[0]


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_many_more_random_schedules() -> None:
    found = search(1_000_000, 100_000)
    assert found.schedules == 100_000
    assert not found.violations


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kinds", [("hosts", "fallback"), ("fallback", "flips"), ("hosts", "fallback", "flips")], ids="+".join
)
def test_many_more_of_a_kind(kinds: tuple[str, ...]) -> None:
    found = search(1_000_000, 40_000, kinds=kinds)
    assert found.schedules == 40_000
    assert not found.violations


@pytest.mark.parametrize("action", ACTIONS)
def test_one_kind_of_fault_again_and_again(action: Action) -> None:
    run_block(1_000_000, BLOCK, actions=(action,), faults=3)


def test_faults_during_recoveries() -> None:
    run_block(2_000_000, 2 * BLOCK, points=("BARRIER", *RECOVERY_POINTS), faults=4)


def test_a_loss_that_ends_the_job_after_it_has_started_a_standby() -> None:
    """On an ordered host, whose order was cancelled before the standby was started there."""
    job = run(random_schedule(52_002_696, hosts=True, supply=True), "seed 52002696, with hosts and supply")
    (*_, last) = job.journal
    kinds = [type(command).__name__ for command in last.commands]
    assert kinds[-3:] == ["Spawn", "CancelHost", "EndJob"], kinds


def test_several_hosts() -> None:
    """Lost, cut off in one direction or in both, back again, late. And it must come to that, or it proves nothing."""
    seen: Counter[str] = Counter()
    for seed in range(4_000_000, 4_000_500):
        schedule = random_schedule(seed, hosts=True)
        job = run(schedule, f"seed {seed}, several hosts")
        report = job.controller.report()
        seen["zombies"] += any(job.workers[name].alive for name in job.fenced if name in job.workers)
        seen["back"] += any(host.known and name == host.name for name in lost_hosts(job) for host in job.hosts)
        seen["finished"] += not report.error and bool(lost_hosts(job))
        seen["private state lost"] += "private state" in report.error
        seen["before the first step"] += "before the first step" in report.error
        seen["before its scripts had ended"] += "before its scripts had ended" in report.error
        seen["joined"] += any("joined;" in c.why for entry in job.journal for c in entry.commands)
        seen["recovered"] += any(f.kind == "host lost" for f in report.failures) and not report.error
        for entry in job.journal:
            restores = [command for command in entry.commands if isinstance(command, Restore)]
            seen["derived"] += any(restore.derived for restore in restores)
    floor = {
        "zombies": 20,
        "back": 20,
        "finished": 100,
        "private state lost": 20,
        "before the first step": 5,
        "before its scripts had ended": 5,
        "joined": 50,
        "recovered": 80,
        "derived": 80,
    }
    assert not {what: (seen[what], least) for what, least in floor.items() if seen[what] < least}


def test_bits_that_flip_by_themselves() -> None:
    """A minority is replaced; without a majority all go back, or the job ends. And it must come to that."""
    seen: Counter[str] = Counter()
    for seed in range(7_000_000, 7_000_600):
        schedule = random_schedule(seed, flips=True, fallback=seed % 3 == 0)
        job = run(schedule, f"seed {seed}, flips")
        report = job.controller.report()
        restores = [c for entry in job.journal for c in entry.commands if isinstance(c, Restore)]
        found = [failure for failure in report.failures if failure.kind == "corruption"]
        seen["flipped"] += bool(job.checker.wrong.flipped)
        seen["a minority is replaced, and training ends well"] += bool(found) and not report.error
        seen["all go back to where they agreed"] += any(
            r.distrust >= 0 and r.tier != FallbackTier.REPLICA for r in restores
        )
        seen["no majority, and the job ends"] += "no majority" in report.error
    floor = {
        "flipped": 300,
        "a minority is replaced, and training ends well": 80,
        "all go back to where they agreed": 10,
        "no majority, and the job ends": 30,
    }
    assert not {what: (seen[what], least) for what, least in floor.items() if seen[what] < least}


def test_last_checkpoints() -> None:
    """A bug of the script ends the job, and what it has reached is saved."""
    seen: Counter[str] = Counter()
    for seed in range(8_000_000, 8_001_000):
        job = run(random_schedule(seed, fallback=True), f"seed {seed}, fallback")
        seen["ordered"] += any(isinstance(c, Save) for entry in job.journal for c in entry.commands)
        seen["saved"] += "was saved as" in job.controller.report().error
        seen["other failures too"] += len(job.controller.report().failures) > 2 and job.schedule.bug_step >= 0
    assert not {what: seen[what] for what, least in {"ordered": 50, "saved": 50}.items() if seen[what] < least}
    assert seen["other failures too"] > 20


def lost_hosts(job: SimulatedJob) -> set[str]:
    return {entry.event.agent for entry in job.journal if isinstance(entry.event, AgentLost)}


@pytest.mark.parametrize("action", ACTIONS)
def test_every_fault_at_every_point(action: Action) -> None:
    struck = 0
    for point in (*STEP_POINTS, *OTHER_POINTS):
        for nth in (1, 5, 6):
            fault = ProcessFault(action=action, point=point, nth=nth, holds_lock=nth == 5)
            schedule = Schedule(seed=nth, world_size=3, standbys=1, faults=(fault,))
            struck += run(schedule, f"{action} in {point}").faults.struck
    assert struck > 25


@pytest.mark.parametrize("second", [Action.KILL, Action.FREEZE, Action.LOOP])
def test_a_second_fault_at_every_point_of_a_recovery(second: Action) -> None:
    struck = 0
    for first in ("FORWARD", "GRADIENT", "READY", "BARRIER", "OPTIMIZER", "AFTER_STEP"):
        for point in (*RECOVERY_POINTS, "VERDICT"):
            for nth in (1, 2, 3):
                faults = (
                    ProcessFault(action=Action.KILL, point=first, nth=nth + 3),
                    ProcessFault(action=second, point=point, nth=nth, holds_lock=nth == 1),
                )
                schedule = Schedule(seed=nth, world_size=3, standbys=nth - 1, faults=faults, seen_dying=0.5)
                struck += run(schedule, f"kill in {first}, {second} in {point}").faults.struck
    assert struck > 300


def test_a_run_without_faults_needs_one_generation() -> None:
    for seed in range(50):
        schedule = random_schedule(seed, faults=0)
        if schedule.network:
            continue
        job = run(schedule, f"seed {seed}")
        assert job.controller.generation == 1
        assert job.end is not None
        assert not job.end.error


def test_the_same_schedule_gives_the_same_run() -> None:
    for seed in range(20):
        schedule = random_schedule(seed)
        again = decode_schedule(encode_schedule(schedule))
        assert again == schedule
        assert run(schedule, f"seed {seed}").journal == run(again, f"seed {seed}").journal


def test_a_search_finds_the_same_whoever_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.sim.search.swarm.BLOCK", 10)  # or all of it is one process's
    alone = search(0, 40, processes=1, mutation="forward-if-any")
    assert alone.violations
    assert search(0, 40, processes=2, mutation="forward-if-any").violations == alone.violations


def test_a_search_can_be_narrowed_down() -> None:
    fallback = [schedule_of(seed, ("fallback", "hosts")) for seed in range(20)]
    assert all(schedule.nodes > 1 and (schedule.buddy_every or schedule.checkpoint_every) for schedule in fallback)
    assert all(schedule_of(seed, ("flips",)).verify_every for seed in range(20))
    found = search(0, 100, mutation="zombies-are-sources", kinds=("hosts",))
    broken = [seed for seed in range(100) if try_seed(seed, "zombies-are-sources", ("hosts",)) is not None]
    assert list(found.violations) == broken
    assert broken != list(search(0, 100, mutation="zombies-are-sources").violations)


def test_the_schedules_reach_what_matters() -> None:
    """A simulation that never gets into trouble proves nothing."""
    seen: Counter[str] = Counter()
    for seed in range(1400):
        schedule = random_schedule(seed)
        job = run(schedule, f"seed {seed}")
        report = job.controller.report()
        seen["recovery"] += len(report.recoveries)
        seen["failure during a recovery"] += sum(r.restarts for r in report.recoveries)
        seen["fresh process"] += sum("fresh" in r.replacement_kind for r in report.recoveries)
        seen["no replacement"] += sum(r.replacement_kind == "none" for r in report.recoveries)
        seen["lost"] += "every replica" in report.error
        seen["finished"] += not report.error
        for trouble in schedule.network:
            seen[trouble.kind] += 1
        for failure in report.failures:
            seen[failure.kind] += 1
        for entry in job.journal:
            seen["expired"] += entry.event is None
            for command in entry.commands:
                if isinstance(command, Restore):
                    seen[command.why.partition(" ")[0]] += 1
                    seen["split"] += "and the others" in command.why
                    seen["died unprepared"] += "died without private state" in command.why
                    seen["several targets"] += len(command.targets) > 1
    floor = {
        "recovery": 750,
        "failure during a recovery": 100,
        "fresh process": 100,
        "no replacement": 40,
        "lost": 8,
        "finished": 800,
        "expired": 100,
        "forward": 60,
        "back": 500,
        "all": 60,
        "fallback": 30,
        "split": 8,
        "died unprepared": 5,
        "several targets": 30,
        "hang": 20,
        "frozen": 50,
        "exception": 50,
        "communication": 20,
        "silence": 50,
        "blackhole": 50,
        "agent": 50,
        "asleep": 50,
    }
    assert not {what: (seen[what], least) for what, least in floor.items() if seen[what] < least}


class TiersOfRunningProcesses(FallbackTiers):
    def go_on(self, what: str, version: int, generation: int) -> None:
        assert not self._worker.frozen
        super().go_on(what, version, generation)


class WorkerWithThose(SimulatedWorker):
    tiers_kind: ClassVar[type[FallbackTiers]] = TiersOfRunningProcesses


def test_work_beside_the_main_thread_stands_still_in_a_frozen_process() -> None:
    stalled = 0
    for seed in range(60):
        schedule = random_schedule(
            seed, faults=2, actions=(Action.FREEZE,), points=("OUTSIDE", "FORWARD", "GRADIENT"), fallback=True
        )
        job = run_schedule(schedule, Parts(worker=WorkerWithThose))
        stalled += any(worker.stalled for worker in job.workers.values())
    assert stalled > 3
