"""More than one failure: at once, in a row, during a recovery, of standbys, and at both ends of the training."""

import itertools
import random
import re
import signal
import time

import psutil
import pytest

from relight.chaos.plan import random_fault
from tests.survival.harness import PATIENCE, Bench, Job, Outcome, Training, send
from tests.survival.judge import check_faults, check_struck, check_survived, describe, expect

SHORT = Training(steps=7)


def survive(
    bench: Bench,
    faults: list[str],
    *,
    training: Training = SHORT,
    standbys: int = 1,
    flags: tuple[str, ...] = (),
    deadline_seconds: float = 100.0 * PATIENCE,
) -> Outcome:
    """Run with faults; the end must be that of the undisturbed job."""
    outcome = bench.run(training, faults=faults, standbys=standbys, flags=flags, deadline_seconds=deadline_seconds)
    check_survived(outcome, bench.reference(training))
    return outcome


def list_failures(outcome: Outcome) -> list[tuple[int, str]]:
    """Rank and kind of each failure, in the order of notice."""
    return [(failure.rank, failure.kind) for failure in outcome.report.failures]


def check_one_recovery(outcome: Outcome, failures: list[tuple[int, str]]) -> None:
    """Exactly these failures, in any order, all answered by one recovery."""
    assert sorted(list_failures(outcome)) == sorted(failures), outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()
    assert outcome.report.recoveries[0].failures == tuple(range(1, len(failures) + 1)), outcome.describe()
    assert outcome.report.recoveries[0].replaced == tuple(sorted({rank for rank, _ in failures})), outcome.describe()


# --- at once --------------------------------------------------------------------------------------------------------
# A freeze is noticed after a second, so both ranks are there; a write is not interrupted, so both get to its middle.
PAIRS = [
    pytest.param("freeze", "freeze", "in FORWARD of step 3", marks=pytest.mark.all),
    pytest.param("freeze", "freeze", "in BACKWARD of step 3", marks=pytest.mark.all),
    pytest.param("kill", "freeze", "in OPTIMIZER of step 3", marks=pytest.mark.all),
    pytest.param("freeze", "segfault", "in OPTIMIZER of step 3", marks=pytest.mark.all),
    # That three at once are lost there, these two among them, is seen by test_all_ranks_but_one.
    pytest.param("kill", "kill", "in OPTIMIZER of step 3", marks=pytest.mark.all),
    pytest.param("exit", "raise", "in AFTER_WRITE of step 3", marks=pytest.mark.all),
]


RANK_PAIRS = [(0, 1), pytest.param((0, 2), marks=pytest.mark.all), pytest.param((1, 2), marks=pytest.mark.all)]


@pytest.mark.parametrize(("first", "second", "where"), PAIRS)
@pytest.mark.parametrize("pair", RANK_PAIRS, ids=str)
def test_two_ranks_at_once(bench: Bench, pair: tuple[int, int], first: str, second: str, where: str) -> None:
    verbs = [f"{verb} in" if verb == "raise" else verb for verb in (first, second)]
    faults = [f"{verb} rank {rank} {where}" for verb, rank in zip(verbs, pair, strict=True)]
    outcome = survive(bench, faults, standbys=1 if pair == (0, 1) else 2)
    check_struck(outcome, faults)
    assert len(outcome.report.recoveries) == 1, outcome.describe()
    assert outcome.report.recoveries[0].replaced == pair


@pytest.mark.all
@pytest.mark.parametrize("pair", list(itertools.combinations(range(3), 2)), ids=str)
@pytest.mark.parametrize("where", ["in FORWARD of step 3", "in BEFORE_BARRIER of step 3", "in BARRIER of step 3"])
def test_two_ranks_killed_at_once(bench: Bench, pair: tuple[int, int], where: str) -> None:
    """The second may be stopped on account of the first before it gets to its own end; then there is one failure."""
    outcome = survive(bench, [f"kill rank {rank} {where}" for rank in pair], standbys=2)
    found = list_failures(outcome)
    assert set(found) <= {(rank, "killed") for rank in pair}, outcome.describe()
    assert len(found) == len(set(found)) >= 1, outcome.describe()


@pytest.mark.parametrize(
    ("verb", "where"),
    [
        pytest.param("kill", "in OPTIMIZER of step 3", marks=pytest.mark.all),
        pytest.param("freeze", "in BACKWARD of step 3", marks=pytest.mark.all),
        pytest.param("freeze", "in BEFORE_BARRIER of step 3", marks=pytest.mark.all),
        pytest.param("segfault", "in AFTER_WRITE of step 3", marks=pytest.mark.all),
    ],
)
@pytest.mark.parametrize(
    "survivor", [pytest.param(0, marks=pytest.mark.all), pytest.param(1, marks=pytest.mark.all), 3]
)
def test_all_ranks_but_one(bench: Bench, survivor: int, verb: str, where: str) -> None:
    training = Training(ranks=4)
    lost = [rank for rank in range(4) if rank != survivor]
    outcome = survive(bench, [f"{verb} rank {rank} {where}" for rank in lost], training=training, standbys=2)
    kind = "frozen" if verb == "freeze" else "killed"
    check_one_recovery(outcome, [(rank, kind) for rank in lost])
    # Under load the others die one after another: a rank that was restored before may be a source as well.
    assert survivor in outcome.report.recoveries[0].sources, outcome.describe()


# --- during a recovery ----------------------------------------------------------------------------------------------
FIRST = "kill rank 1 in BACKWARD of step 3"
# No rank can pass the barrier, and all others are prepared: the survivors finish the step by themselves.
FIRST_FORWARD = "freeze rank 1 in BEFORE_BARRIER of step 3"
SECOND = {
    "stop": (FIRST, "kill rank 0 in STOP of recovery 1", (0, "killed")),
    "stop_frozen": (FIRST, "freeze rank 0 in STOP of recovery 1", (0, "frozen")),
    "stop_raise": (FIRST, "raise in rank 2 in STOP of recovery 1", (2, "exception")),
    "finish": (FIRST_FORWARD, "kill rank 0 in FINISH of recovery 1", (0, "killed")),
    "finish_frozen": (FIRST_FORWARD, "freeze rank 2 in FINISH of recovery 1", (2, "frozen")),
    "reform": (FIRST, "kill rank 2 in REFORM of recovery 1", (2, "killed")),
    "reform_frozen": (FIRST, "freeze rank 0 in REFORM of recovery 1", (0, "frozen")),
    "reform_replacement": (FIRST, "kill rank 1 in REFORM of recovery 1", (1, "killed")),
    "restore_receive": (FIRST, "kill the restore target during the next restore", (1, "killed")),
    "restore_receive_frozen": (FIRST, "freeze the restore target during the next restore", (1, "frozen")),
    "rollback": (FIRST, "kill rank 0 in ROLLBACK of recovery 1", (0, "killed")),
    "rollback_exit": (FIRST, "exit rank 2 in ROLLBACK of recovery 1", (2, "exited")),
    "rollback_replacement": (FIRST, "kill rank 1 in ROLLBACK of recovery 1", (1, "killed")),
    "promoted": (FIRST, "kill the replacement when promoted in recovery 1", (1, "killed")),
    "promoted_frozen": (FIRST, "freeze the replacement when promoted in recovery 1", (1, "frozen")),
}
SECOND_IN_CI = {"stop", "restore_receive"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SECOND_IN_CI else pytest.mark.all) for name in SECOND]
)
def test_second_failure_in_each_stage_of_a_recovery(bench: Bench, name: str) -> None:
    first, second, expected = SECOND[name]
    outcome = survive(bench, [first, second])
    kind = "frozen" if first is FIRST_FORWARD else "killed"
    assert list_failures(outcome) == [(1, kind), expected], outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()
    recovery = outcome.report.recoveries[0]
    assert (recovery.failures, recovery.restarts) == ((1, 2), 1), outcome.describe()
    if first is FIRST_FORWARD:
        assert (recovery.target_version, recovery.steps_repeated) == (4, 0), outcome.describe()
    else:
        assert recovery.target_version == 3, outcome.describe()
        # Only the survivor of both may have begun step 3; rank 0 can be stopped while that one is still before it.
        assert (recovery.steps_repeated == 1) == (recovery.decision == "back"), outcome.describe()


@pytest.mark.parametrize("verb", ["kill", pytest.param("freeze", marks=pytest.mark.all)])
def test_the_restore_source_fails_in_mid_copy(bench: Bench, verb: str) -> None:
    """The other survivor is the source of the next attempt: no good copy was overwritten."""
    outcome = survive(bench, [FIRST, f"{verb} the restore source during the next restore"])
    (_, second) = outcome.report.failures
    recovery = outcome.report.recoveries[0]
    assert second.rank in (0, 2), outcome.describe()
    assert second.kind == ("frozen" if verb == "freeze" else "killed"), outcome.describe()
    assert recovery.sources == (2 - second.rank,), outcome.describe()
    assert recovery.replaced == tuple(sorted((1, second.rank))), outcome.describe()


@pytest.mark.parametrize(
    ("verb", "kind"), [("kill", "killed"), pytest.param("freeze", "frozen", marks=pytest.mark.all)]
)
def test_second_failure_when_told_to_resume(bench: Bench, verb: str, kind: str) -> None:
    """The first recovery is over for the controller, so this is a second one: of the same step."""
    outcome = survive(bench, [FIRST, f"{verb} rank 0 in RESUME of recovery 1"])
    assert list_failures(outcome) == [(1, "killed"), (0, kind)], outcome.describe()
    assert [recovery.failures for recovery in outcome.report.recoveries] == [(1,), (2,)], outcome.describe()
    assert [recovery.target_version for recovery in outcome.report.recoveries] == [3, 3], outcome.describe()


@pytest.mark.all
def test_a_third_failure_in_the_recovery_of_the_second(bench: Bench) -> None:
    faults = [FIRST, "kill rank 0 in REFORM of recovery 1", "kill the replacement when promoted in recovery 2"]
    outcome = survive(bench, faults, standbys=2)
    assert len(outcome.report.recoveries) == 1, outcome.describe()
    assert outcome.report.recoveries[0].restarts == 2, outcome.describe()


# --- standbys -------------------------------------------------------------------------------------------------------
def test_no_standby(bench: Bench) -> None:
    outcome = survive(bench, [FIRST], standbys=0)
    check_faults(outcome, [FIRST])
    assert outcome.report.recoveries[0].replacement_kind == "fresh process"


@pytest.mark.all
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_fails_while_it_waits(bench: Bench, number: signal.Signals) -> None:
    """A lost standby is reported and replaced. It has no rank, so its loss is no failure of the training."""
    training = Training(steps=7, arguments=("--hold-at", "2"))
    flags = ("--outside-hang-timeout-seconds", "600")
    with bench.start(training, faults=[FIRST], flags=flags) as job:
        job.wait_until(lambda: is_journaled(job, "StandbyReady", "w3"), "the standby is warm")
        send(job.workers()["w3"], number)
        job.wait_until(lambda: is_journaled(job, "ProcessExited", "w3"), "the standby is gone")
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, [FIRST])
    assert "standby w3" in outcome.stderr, outcome.describe()
    assert outcome.report.recoveries[0].replacement_kind == "standby", outcome.describe()


def is_journaled(job: Job, event: str, process: str) -> bool:
    """Return whether the controller has taken in this event of this process."""
    return f'"type":"{event}","process":"{process}"' in job.journal()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("kill standby 0 in warmup", marks=pytest.mark.all),
        pytest.param("raise in standby 0 in warmup", marks=pytest.mark.all),
        pytest.param("freeze standby 0 in warmup", marks=pytest.mark.all),
        pytest.param("exit standby 0 in warmup", marks=pytest.mark.all),
    ],
)
def test_a_standby_fails_in_its_warmup(bench: Bench, fault: str) -> None:
    outcome = survive(bench, [fault, FIRST])
    assert "standby" in outcome.stderr, outcome.describe()
    check_faults(outcome, [FIRST])


@pytest.mark.all
def test_a_standby_that_never_becomes_ready(bench: Bench) -> None:
    """After a while a fresh process is started beside it."""
    outcome = survive(bench, ["block standby 0 in warmup", FIRST], deadline_seconds=150 * PATIENCE)
    check_faults(outcome, [FIRST])
    assert outcome.report.recoveries[0].replacement_kind == "fresh process", outcome.describe()


# --- an all-reduce that not everyone completes ----------------------------------------------------------------------
def test_a_cut_collective(bench: Bench) -> None:
    """All processes live, and still the barrier broke: the job goes on, forward or back, all ranks alike."""
    training = Training(steps=16)
    faults = [f"cut rank {step % 3} in BARRIER of step {step}" for step in range(2, 14, 2)]
    outcome = survive(bench, faults, training=training)
    assert {failure.kind for failure in outcome.report.failures} <= {"communication"}, outcome.describe()
    assert not any(recovery.replaced for recovery in outcome.report.recoveries), outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.all), pytest.param(3, marks=pytest.mark.all)])
def test_a_cut_and_a_kill_in_one_barrier(bench: Bench, victim: int) -> None:
    """One survivor loses its side of the barrier while another rank dies in it: the others may have passed."""
    training = Training(ranks=4)
    faults = [f"cut rank 2 in BARRIER of step {step}" for step in (3, 5)]
    faults += [f"kill rank {victim} in BARRIER of step {step}" for step in (3, 5)]
    outcome = survive(bench, faults, training=training, standbys=2)
    killed = [failure for failure in outcome.report.failures if failure.kind == "killed"]
    assert {failure.rank for failure in killed} <= {victim}, outcome.describe()
    assert {failure.kind for failure in outcome.report.failures} <= {"killed", "communication"}, outcome.describe()
    for recovery in outcome.report.recoveries:
        assert recovery.target_version in (3, 4, 5, 6), outcome.describe()


@pytest.mark.all
def test_ranks_on_both_sides_of_a_barrier(bench: Bench) -> None:
    """Cut barriers until one has been completed by some and not by others: those finish the step by themselves."""
    training = Training(ranks=4, steps=60)
    split = re.compile(r"ranks [\d, ]+ finished step \d+ and the others are prepared")
    for first in range(4):
        faults = [f"cut rank {(step + first) % 4} in BARRIER of step {step}" for step in range(2, 58, 2)]
        outcome = survive(bench, faults, training=training)
        splits = [recovery for recovery in outcome.report.recoveries if split.search(recovery.reason)]
        for recovery in splits:
            assert (recovery.decision, recovery.steps_repeated) == ("forward", 0), outcome.describe()
        if splits:
            return
    pytest.fail("no barrier was split: cut it elsewhere")


# --- in a row -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [(0, 1, 2, 0, 1), (1, 1, 1, 1, 1)], ids=["all", "one"])
@pytest.mark.all  # see also test_matrix.test_faults_in_a_row
def test_five_failures_in_a_row(bench: Bench, ranks: tuple[int, ...]) -> None:
    """One step after the other loses a rank."""
    faults = [f"kill rank {rank} in BACKWARD of step {step}" for step, rank in enumerate(ranks, 1)]
    outcome = survive(bench, faults, standbys=2)
    check_faults(outcome, faults)
    assert [recovery.target_version for recovery in outcome.report.recoveries] == [1, 2, 3, 4, 5]


@pytest.mark.all
def test_one_step_fails_again_and_again(bench: Bench) -> None:
    faults = [f"kill rank {rank} in BACKWARD of step 3 attempt {rank}" for rank in range(3)]
    outcome = survive(bench, faults)
    assert list_failures(outcome) == [(0, "killed"), (1, "killed"), (2, "killed")], outcome.describe()
    assert [recovery.target_version for recovery in outcome.report.recoveries] == [3, 3, 3], outcome.describe()


@pytest.mark.parametrize("seed", [9, 4, 7, 8, 10, 12, 14, 15])
@pytest.mark.all
def test_random_faults(bench: Bench, seed: int) -> None:
    """A seed and a rate give the same faults each time, so that they can be told beforehand.

    Of two in neighbouring steps the second may not strike: if the first made its step a repeated one.
    """
    training, rate = Training(steps=12), 0.25
    drawn = [random_fault(seed, rate, step, training.ranks) for step in range(training.steps)]
    planned = {step: expect(fault) for step, fault in enumerate(drawn) if fault is not None}
    flags = ("--chaos-seed", str(seed), "--chaos-rate", str(rate))
    outcome = survive(bench, [], training=training, standbys=2, flags=flags)
    found = {failure.step: describe(failure) for failure in outcome.report.failures}
    assert len(found) == len(outcome.report.failures), outcome.describe()
    assert found.items() <= planned.items(), outcome.describe()
    assert found.keys() >= {step for step in planned if step - 1 not in planned}, outcome.describe()


# --- from outside, at any moment -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("seed", "count", "pause"),
    [(1, 3, 0.01), (2, 12, 0.03), (3, 12, 0.03), (4, 12, 0.03)],
)
@pytest.mark.all
def test_signals_at_any_moment(bench: Bench, seed: int, count: int, pause: float) -> None:
    """No planned fault, which strikes at a known place: ranks are killed or stopped wherever they happen to be."""
    steps = round(count * 0.6 / pause)
    training = Training(steps=steps + 7, arguments=("--pause", str(pause), "--hold-at", str(steps)))
    draw = random.Random(seed)
    with bench.start(training, standbys=2, flags=("--outside-hang-timeout-seconds", "600")) as job:
        job.wait_until(lambda: trains(job), "training has begun")
        for _ in range(count):
            time.sleep(draw.uniform(0.0, 0.2))
            lose(job, draw.choice(members(job)), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
            job.wait_until(lambda: trains(job), "all ranks train again")
        job.release()
        outcome = job.wait()
    check_survived(outcome, bench.reference(training))
    assert len(outcome.report.failures) == count, outcome.describe()
    assert {failure.kind for failure in outcome.report.failures} <= {"killed", "frozen"}, outcome.describe()


def lose(job: Job, process: psutil.Process, number: signal.Signals) -> None:
    """Signal a process, and wait until the controller knows that it is gone."""
    exits = job.journal().count('"type":"ProcessExited"')
    send(process, number)
    job.wait_until(lambda: job.journal().count('"type":"ProcessExited"') > exits, "the process is gone")


def trains(job: Job) -> bool:
    """Return whether training goes on: the last thing that concerned all ranks was that they begin, or resume."""
    journal = job.journal()
    return max(journal.rfind('"type":"Begin"'), journal.rfind('"type":"Resume"')) > journal.rfind('"type":"Stop"')


def members(job: Job) -> list[psutil.Process]:
    """The processes that hold a rank."""
    assigned = dict(re.findall(r'"type":"Assign"[^{}]*"process":"(\w+)","rank":(\d+)', job.journal()))
    workers = job.workers()
    holders = {rank: workers[name] for name, rank in assigned.items() if name in workers}
    return [holders[rank] for rank in sorted(holders)]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.all)])
def test_a_rank_fails_before_the_first_step(bench: Bench, number: signal.Signals) -> None:
    """There is nothing to lose yet: all ranks start anew."""
    with bench.start(SHORT) as job:
        job.wait_until(lambda: "w1" in job.workers(), "rank 1 starts")
        send(job.workers()["w1"], number)
        outcome = job.wait()
    check_survived(outcome, bench.reference(SHORT))
    assert "before the first step" in outcome.stderr, outcome.describe()
    assert not outcome.report.failures, outcome.describe()


@pytest.mark.all
@pytest.mark.parametrize("where", ["in FORWARD of step 3", "in BACKWARD of step 3", "between steps at step 3"])
def test_blocked_for_ever(bench: Bench, where: str) -> None:
    """As if by I/O that never comes."""
    outcome = survive(bench, [f"block rank 1 {where}"])
    check_faults(outcome, [f"block rank 1 {where}"])


# --- the first step, the last step, and after it --------------------------------------------------------------------
EDGES = {
    "first_between": ["kill rank 1 between steps at step 0"],
    "first_forward": ["kill rank 0 in FORWARD of step 0"],
    "first_backward": ["freeze rank 2 in BACKWARD of step 0"],
    "first_write": ["kill rank 0 in OPTIMIZER of step 0"],
    "second_forward": ["kill rank 1 in FORWARD of step 1"],
    "last_backward": ["kill rank 1 in BACKWARD of step 6"],
    "last_barrier": ["freeze rank 1 in BARRIER of step 6"],
    "last_write": ["kill rank 0 in OPTIMIZER of step 6"],
    "last_committed": ["exit rank 2 after step 6"],
    "last_looping": ["loop rank 1 after step 6"],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("first_forward", "last_write") else pytest.mark.all) for name in EDGES],
)
def test_first_and_last_step(bench: Bench, name: str) -> None:
    outcome = survive(bench, EDGES[name])
    check_faults(outcome, EDGES[name])


def test_a_rank_that_is_done_is_lost(bench: Bench) -> None:
    """Rank 0 hangs behind its last step; while the others wait for it, done, one of them is killed too."""
    outcome = survive(bench, ["freeze rank 0 after step 6", "kill rank 1 in STOP of recovery 1"])
    assert list_failures(outcome) == [(0, "frozen"), (1, "killed")], outcome.describe()
    (recovery,) = outcome.report.recoveries
    assert (recovery.target_version, recovery.steps_repeated) == (7, 0), outcome.describe()
