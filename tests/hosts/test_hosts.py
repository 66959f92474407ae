"""Jobs on several hosts, each a network namespace: lost, cut off and healed, late."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.namespaces import missing
from tests.device.driver import Driver, why_not
from tests.hosts.cluster import REACH_SECONDS, Cluster
from tests.hosts.conftest import STEPS, TRAINING, begin, finish
from tests.survival.harness import DEADLINE_SECONDS, PATIENCE, Bench, Outcome, Training, send

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="the command nft is not installed (nftables has it)")


@pytest.mark.all
def test_two_hosts_train_as_one(cluster: Cluster, reference: Outcome) -> None:
    begin(cluster)
    assert [len(cluster.workers(number)) for number in (0, 1)] == [3, 3]  # two ranks, and a standby on each
    outcome = finish(cluster, reference)
    assert not outcome.report.failures, outcome.describe()


def test_a_host_is_lost(cluster: Cluster, reference: Outcome) -> None:
    begin(cluster)
    cluster.lose(1)
    lost_at = time.monotonic()
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
    seconds = time.monotonic() - lost_at
    print(f"training again after {seconds:.2f} s")
    outcome = finish(cluster, reference)
    # The silence itself counts: it is not waited for first, and then the whole time once more.
    assert seconds < REACH_SECONDS + 1 + 2 * PATIENCE, outcome.describe()
    assert [failure.rank for failure in outcome.report.failures] == [2, 3], outcome.describe()
    assert {failure.kind for failure in outcome.report.failures} == {"host lost"}, outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()  # one, not one for each rank
    assert outcome.report.recoveries[0].replaced == (2, 3), outcome.describe()


def test_one_line_on_every_node_and_a_spare_that_comes_first(tmp_path: Path, reference: Outcome) -> None:
    """The spare does not take the place of a node, has the warm standbys, and takes the ranks of a lost node."""
    with Cluster(tmp_path, TRAINING, 2, standbys=2, spare=1) as cluster:
        hosts = "\n".join(cluster.address(number) for number in range(3))
        job = {"SKYPILOT_NODE_IPS": hosts, "SKYPILOT_NUM_NODES": "3", "MASTER_PORT": "29400"}
        for number, until in ((0, "node-0 joined"), (2, "node-2 joined as a spare"), (1, "training; rank 0")):
            cluster.start_by_variables(number, {**job, "SKYPILOT_NODE_RANK": str(number)})
            cluster.wait_until(lambda until=until: until in cluster.messages(), until)  # type: ignore[misc]
        said = f"node 2 of 3, the last 1 of them spare; the controller is at {cluster.endpoint}"
        assert said in cluster.messages(2)
        cluster.wait_until(lambda: cluster.journal().count('"StandbyReady"') >= 2, "both standbys are warm")
        assert [sorted(cluster.workers(number)) for number in range(3)] == [["w0", "w1"], ["w2", "w3"], ["w4", "w5"]]
        cluster.wait_until(lambda: "committed 3" in cluster.output(), "training has begun")
        cluster.lose(1)
        cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
        assert {"w4", "w5"} <= set(cluster.workers(2))
        outcome = finish(cluster, reference)
    assert [failure.rank for failure in outcome.report.failures] == [2, 3], outcome.describe()
    assert outcome.report.recoveries[0].replacement_kind == "standby", outcome.describe()


def test_a_lost_host_is_replaced_by_one_that_is_ordered(tmp_path: Path, reference: Outcome) -> None:
    """By a command of the user's; the order is cancelled with the job, and nothing of it is left."""
    with Cluster(tmp_path, TRAINING, 2, standbys=2, spare=1) as cluster:
        begin(cluster, "--supplier", cluster.ordering(2))
        cluster.lose(1)
        cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
        cluster.wait_until(lambda: "ordered-1 joined; 2 hosts" in cluster.messages(), "the ordered host is there")
        cluster.wait_until(lambda: bool(cluster.workers(2)), "a standby moves to the ordered host")
        outcome = finish(cluster, reference)
        first, last = (tmp_path / "orders").read_text().splitlines()
    assert (first, last.split()[:2]) == ("order ordered-1 ", ["cancel", "ordered-1"])
    assert last.split()[2].isdecimal()
    assert outcome.report.recoveries[0].replaced == (2, 3), outcome.describe()


@pytest.mark.parametrize("way", ["SIGTERM", pytest.param("drain", marks=pytest.mark.all)])
def test_a_host_is_left_in_order_and_no_step_is_repeated(tmp_path: Path, reference: Outcome, way: str) -> None:
    """By `relight drain`, or by SIGTERM to its `relight run`, as a cluster that needs the host sends it."""
    with Cluster(tmp_path, TRAINING, 2, standbys=2, spare=1) as cluster:
        cluster.start()
        cluster.join(2)
        cluster.wait_until(lambda: "spare-2 joined" in cluster.messages(), "the spare is there")
        cluster.wait_until(lambda: "committed 3" in cluster.output(), "training has begun")
        if way == "SIGTERM":
            cluster.launchers["h1"].send_signal(signal.SIGTERM)
        else:
            arguments = ("drain", str(cluster.run_dir), "node-1", "--token-file", str(tmp_path / "token"))
            cluster.run_on(0, *arguments, label="-drain")
            assert cluster.launchers.pop("h0-drain").wait(DEADLINE_SECONDS) == 0
        assert cluster.launchers.pop("h1").wait(DEADLINE_SECONDS) == 0, cluster.messages(1)
        assert "node-1 is given back" in cluster.messages()
        assert not cluster.processes(1)
        outcome = finish(cluster, reference)
    assert {(f.rank, f.kind) for f in outcome.report.failures} == {(2, "drained"), (3, "drained")}, outcome.describe()
    (recovery,) = outcome.report.recoveries
    assert (recovery.steps_repeated, recovery.steps_undone) == (0, 0), outcome.describe()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_host_whose_gpu_reports_a_fault_is_left(tmp_path: Path, reference: Outcome) -> None:
    """As soon as another host has room, and with no step repeated. Errors of programs are no faults."""
    driver = Driver(tmp_path / "driver", devices=2)
    variables = {**driver.variables, "CUDA_VISIBLE_DEVICES": "0,1", "RELIGHT_MACHINE": "rack-7"}
    with Cluster(tmp_path, TRAINING, 2, standbys=2, spare=1) as cluster:
        cluster.start("--fault-status", "76", variables={1: variables})
        cluster.wait_until(lambda: "committed 3" in cluster.output(), "training has begun")
        driver.say("xid 0 31")
        driver.say("xid 1 79")
        cluster.wait_until(lambda: "node-1 (rack-7) reported a fault" in cluster.messages(), "it is said")
        assert "is drained" not in cluster.messages()
        cluster.join(2)
        assert cluster.launchers.pop("h1").wait(DEADLINE_SECONDS) == 76, cluster.describe()
        assert "node-1 is given back: GPU 1: XID 79, the device has fallen off the bus" in cluster.messages()
        status = (sys.executable, "-m", "relight", "status", str(cluster.run_dir))
        told = subprocess.run(status, capture_output=True, text=True, check=False).stdout  # 3: it is running
        assert "rack-7 (GPU 1: XID 79" in " ".join(told.split()), told
        outcome = finish(cluster, reference)
    assert {(f.rank, f.kind) for f in outcome.report.failures} == {(2, "drained"), (3, "drained")}, outcome.describe()
    (recovery,) = outcome.report.recoveries
    assert (recovery.steps_repeated, recovery.steps_undone) == (0, 0), outcome.describe()
    assert any("rack-7" in text and "XID 79" in text for text in outcome.report.notices), outcome.describe()
    assert not any("XID 31" in text for text in outcome.report.notices), outcome.describe()


@pytest.mark.all
def test_a_job_is_ended_by_hand_after_a_step_and_a_checkpoint(tmp_path: Path) -> None:
    """`relight end` on any host that sees the run directory, as a batch script does before its time limit."""
    checkpoints = ("--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "50")
    training = Training(ranks=4, steps=STEPS, arguments=("--pause", "0.2", "--tell", *checkpoints))
    with Cluster(tmp_path, training, 2, standbys=1) as cluster:
        cluster.start()
        cluster.wait_until(lambda: "committed 3" in cluster.output(), "training has begun")
        cluster.run_on(1, "end", str(cluster.run_dir), "--token-file", str(tmp_path / "token"), label="-end")
        outcome = cluster.wait()
        assert cluster.launchers.pop("h1-end").wait(DEADLINE_SECONDS) == 0
        cluster.check_nothing_is_left()
    report = outcome.report
    assert f"stopped: relight end, after {report.final_version} of {STEPS} steps" in report.error, outcome.describe()
    assert any((tmp_path / "checkpoints").iterdir())


@pytest.mark.all
def test_a_rank_is_lost_whose_host_has_no_standby_left(tmp_path: Path, reference: Outcome) -> None:
    """Its replacement, on the other host, gets the state over TCP and the private state through the controller."""
    with Cluster(tmp_path, TRAINING, 2, standbys=1) as cluster:
        cluster.start()
        cluster.wait_until(lambda: '"StandbyReady"' in cluster.journal(), "the standby is warm")
        cluster.wait_until(lambda: "committed 3" in cluster.output(), "training has begun")
        (standby,) = [number for number in (0, 1) if len(cluster.workers(number)) == 3]
        victim = "w2" if standby == 0 else "w0"
        send(cluster.workers(1 - standby)[victim], signal.SIGKILL)
        cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
        outcome = finish(cluster, reference)
    assert [failure.rank for failure in outcome.report.failures] == [int(victim[1:])], outcome.describe()
    assert outcome.report.recoveries[0].replacement_kind == "standby", outcome.describe()


@pytest.mark.all
def test_all_this_in_tls(tmp_path: Path, reference: Outcome) -> None:
    """As above, and each host proves its address with a certificate; one without is told what to do, and leaves."""
    with Cluster(tmp_path, TRAINING, 2, standbys=1, spare=1, tls=True) as cluster:
        cluster.start()
        cluster.wait_until(lambda: '"StandbyReady"' in cluster.journal(), "the standby is warm")
        cluster.wait_until(lambda: "committed 3" in cluster.output(), "training has begun")
        cluster.run_on(2, "agent", "--controller", cluster.endpoint, "--token-file", str(tmp_path / "token"))
        assert cluster.launchers.pop("h2").wait(30.0) == 1, cluster.messages(2)
        assert "pass --tls-ca, --tls-cert and --tls-key here too" in cluster.messages(2)
        (standby,) = [number for number in (0, 1) if len(cluster.workers(number)) == 3]
        victim = "w2" if standby == 0 else "w0"
        send(cluster.workers(1 - standby)[victim], signal.SIGKILL)
        cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
        outcome = finish(cluster, reference)
    assert [failure.rank for failure in outcome.report.failures] == [int(victim[1:])], outcome.describe()
    assert outcome.report.recoveries[0].replacement_kind == "standby", outcome.describe()


@pytest.mark.all
def test_a_partition_that_heals_brings_back_nobody(cluster: Cluster, reference: Outcome) -> None:
    """The cut-off host's ranks live on, are replaced, and are killed when they can be heard again."""
    begin(cluster)
    zombies = {process.pid for name, process in cluster.workers(1).items() if name in ("w2", "w3")}
    assert len(zombies) == 2
    cluster.cut(1)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on without the host")
    assert zombies <= {process.pid for process in cluster.workers(1).values()}
    cluster.heal(1)
    cluster.wait_until(lambda: "node-1 joined; 2 hosts" in cluster.messages(), "the host is back, as a new one")
    cluster.wait_until(lambda: not zombies & {p.pid for p in cluster.workers(1).values()}, "the zombies are dead")
    outcome = finish(cluster, reference)
    assert len(outcome.report.recoveries) == 1, outcome.describe()


@pytest.mark.all
@needs_nft
def test_a_host_that_only_the_controller_has_lost(cluster: Cluster, reference: Outcome) -> None:
    """Its ranks see the others and not the controller: they are replaced, and cannot go on by themselves."""
    begin(cluster)
    cluster.cut_controller(1)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on without the host")
    cluster.heal_controller(1)
    cluster.wait_until(lambda: "node-1 joined; 2 hosts" in cluster.messages(), "the host is back, as a new one")
    outcome = finish(cluster, reference)
    assert {failure.kind for failure in outcome.report.failures} == {"host lost"}, outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()


@pytest.mark.all
@needs_nft
@pytest.mark.parametrize("hook", ["input", "output"])
def test_a_host_that_hears_and_is_not_heard_or_the_reverse(cluster: Cluster, reference: Outcome, hook: str) -> None:
    """All is lost in one direction. What lived on there is killed once it can be heard again."""
    begin(cluster)
    zombies = {process.pid for name, process in cluster.workers(1).items() if name in ("w2", "w3")}
    assert len(zombies) == 2
    cluster.cut_one_way(1, hook)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on without the host")
    cluster.heal_controller(1)
    cluster.wait_until(lambda: not zombies & {p.pid for p in cluster.workers(1).values()}, "the zombies are dead")
    outcome = finish(cluster, reference)
    assert {failure.rank for failure in outcome.report.failures} >= {2, 3}, outcome.describe()


@needs_nft
def test_a_host_that_connects_again_in_time_is_not_lost(cluster: Cluster, reference: Outcome) -> None:
    """The kernel has ended the connection after half of the time; in the other half the agent finds its way back."""
    begin(cluster, "--agent-timeout-seconds", "12")
    cluster.cut_controller(1)
    cluster.wait_until(lambda: "lost the connection to agent node-1" in cluster.messages(), "the silence is noticed")
    cluster.heal_controller(1)
    outcome = finish(cluster, reference)
    assert not outcome.report.failures, outcome.describe()


@pytest.mark.all
@needs_nft
def test_a_moment_of_silence_changes_nothing(cluster: Cluster, reference: Outcome) -> None:
    """Shorter than what the connections bear: what was on its way is sent again."""
    begin(cluster, "--agent-timeout-seconds", "20")
    cluster.cut_controller(1)
    cluster.wait_for_steps(10)  # training goes on meanwhile
    cluster.heal_controller(1)
    outcome = finish(cluster, reference)
    assert not outcome.report.failures, outcome.describe()


@pytest.mark.all
def test_a_late_host_is_room_for_standbys(cluster: Cluster, reference: Outcome) -> None:
    begin(cluster)
    cluster.join(2)
    cluster.wait_until(lambda: "spare-2 joined; 3 hosts" in cluster.messages(), "the late host is there")
    cluster.lose(1)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
    cluster.wait_until(lambda: len(cluster.workers(2)) >= 1, "the late host has a process")
    outcome = finish(cluster, reference)
    assert outcome.report.recoveries[0].replaced == (2, 3), outcome.describe()


@pytest.mark.all
def test_the_controller_dies_while_hosts_look_on(cluster: Cluster, reference: Outcome) -> None:
    begin(cluster)
    (controller,) = [p for p in cluster.processes(0) if p.cmdline()[1:4] == ["-P", "-m", "relight.server"]]
    send(controller, signal.SIGKILL)
    cluster.wait_until(lambda: '"ControllerRestarted"' in cluster.journal(), "another controller is in charge")
    send(cluster.workers(1)["w2"], signal.SIGKILL)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "it handles failures")
    outcome = finish(cluster, reference)
    assert outcome.report.controller_restarts == 1
    assert [failure.rank for failure in outcome.report.failures] == [2], outcome.describe()


@pytest.mark.all
def test_the_controller_s_host_is_lost_and_another_goes_on(cluster: Cluster, reference: Outcome) -> None:
    """By hand: `relight controller` on a host that sees the run directory. Agents find it there."""
    begin(cluster)
    cluster.lose(0)
    cluster.go_on(1)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
    outcome = finish(cluster, reference)
    assert outcome.report.controller_restarts == 1
    assert [failure.rank for failure in outcome.report.failures] == [0, 1], outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()


@pytest.mark.all
def test_a_frozen_controller_is_taken_over_and_gives_way_when_it_wakes(cluster: Cluster, reference: Outcome) -> None:
    """It and its possible successors are stopped, so its connections live and it holds the journal's lock."""
    begin(cluster)
    names = {"relight.server", "relight.cli"}
    frozen = [p for p in cluster.processes(0) if names & set(p.cmdline()[1:4])]
    assert len(frozen) == 2, [p.cmdline() for p in frozen]
    for process in frozen:
        send(process, signal.SIGSTOP)
    cluster.go_on(1)
    assert cluster.launchers[cluster.chief].wait(DEADLINE_SECONDS) != 0  # it does not start without being told so
    assert "is being written by another controller" in cluster.messages(), cluster.describe()
    cluster.go_on(1, "--take-over")
    cluster.wait_until(lambda: '"ControllerRestarted"' in cluster.journal(), "another controller is in charge")
    send(cluster.workers(1)["w2"], signal.SIGKILL)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "it handles failures")
    for process in frozen:
        send(process, signal.SIGCONT)
    cluster.wait_until(
        lambda: "the job has another controller; this host" in cluster.messages(0), "the old one is told"
    )
    outcome = finish(cluster, reference)
    assert outcome.report.controller_restarts == 1
    # If its agent came late to the new controller, the broken collective (rank -1) was heard of before the death.
    assert [failure.rank for failure in outcome.report.failures if failure.rank >= 0] == [2], outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()


@pytest.mark.all
def test_what_only_a_lost_host_had_ends_the_job(tmp_path: Path) -> None:
    """Statistics of BatchNorm differ between ranks; no other host has those of this one, so the job says so."""
    training = Training(ranks=4, steps=STEPS, arguments=(*TRAINING.arguments, "--batchnorm", "--local-buffers"))
    with Cluster(tmp_path, training, 2, standbys=2) as cluster:
        begin(cluster)
        cluster.lose(1)
        outcome = cluster.wait()
    assert outcome.status == 1, outcome.describe()
    assert "the private state of ranks 2, 3" in outcome.report.error, outcome.describe()
    assert "Resume from your last checkpoint" in outcome.report.error, outcome.describe()


DIVIDED = Training(
    ranks=4,
    steps=125,
    program="divided.py",
    arguments=("--layout", "fsdp", "--buddy", "10", "--pause", "0.05", "--tell", "--hold-at", "120"),
)


@pytest.mark.all
def test_a_host_is_lost_with_half_of_a_state_without_replicas(tmp_path: Path) -> None:
    """Each rank's buddy is on the other host: all that was lost is in the memory of the one that is left."""
    directories = iter([tmp_path / "reference"])
    undisturbed = Bench(lambda: next(directories)).reference(DIVIDED)
    with Cluster(tmp_path / "hosts", DIVIDED, 2, standbys=2) as cluster:
        cluster.start()
        cluster.wait_until(lambda: cluster.journal().count('"StandbyReady"') >= 2, "both standbys are warm")
        cluster.wait_until(lambda: "committed 13" in cluster.output(), "a snapshot is with its buddies")
        cluster.lose(1)
        cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
        cluster.release()
        outcome = cluster.wait()
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    (recovery,) = outcome.report.recoveries
    assert (recovery.tier, recovery.replaced) == ("buddy memory", (2, 3)), outcome.describe()
    assert recovery.steps_undone <= 20, outcome.describe()
    assert outcome.finals == undisturbed.finals, outcome.describe()
    assert outcome.report.final_state_digest == undisturbed.report.final_state_digest
