"""A job that must end saves what it has reached: from whose state, of which version, and when it does without."""

import msgspec
import pytest

from relight.core.controller import HEARING_SECONDS, Stage
from relight.core.job.saving import SAVE_SECONDS
from relight.core.protocol import events as ev
from relight.core.protocol.commands import EndJob, Kill, Notice, Save, Spawn, Stop
from relight.core.recovery.fallback import LastCheckpoint, last_checkpoint
from relight.core.recovery.shards import Shards
from tests.core.recovery.test_fallback import HSDP, NOW, report
from tests.core.test_controller import OUTSIDE_SECONDS, STOP_TIMEOUT_SECONDS, Desk, killed, kinds, one


def training(world_size: int = 2, standbys: int = 0, every: int = 10, **settings: float | None) -> Desk:
    """A job that keeps checkpoints, and gives up at its first failure."""
    desk = Desk(world_size, standbys, **{"max_failures": 0, **settings})
    desk.started()
    for rank, process in desk.controller.rank_processes().items():
        desk.enters(process, rank, checkpoint_every=every)
    assert desk.controller.stage is Stage.TRAINING
    return desk


def saved(desk: Desk, process: str = "w0", **changes: object) -> None:
    order = desk.controller.saving_order
    assert order is not None
    event = ev.Saved(process=process, generation=order.generation, version=order.target, path="/checkpoints/step")
    desk.tell(msgspec.structs.replace(event, **changes))


# --- the decision -------------------------------------------------------------------------------------------------
def test_of_a_divided_state_each_part_is_written_by_its_first_intact_holder() -> None:
    reports = [report(1), report(2), report(3)]
    last = last_checkpoint(reports, {0: (NOW, NOW + 1)}, Shards(HSDP), 4)
    assert isinstance(last, LastCheckpoint)
    assert (last.target, last.writers) == (NOW, (("shard 2/2", 1), ("shard 1/2", 2)))


def test_a_part_without_a_holder_cannot_be_saved() -> None:
    last = last_checkpoint([report(1), report(3)], {0: (NOW,), 2: (NOW,)}, Shards(HSDP), 4)
    assert last == "part shard 1/2 of the state, held by ranks 0, 2 only: every copy is lost"


def test_private_state_that_nobody_has_cannot_be_saved() -> None:
    last = last_checkpoint([report(1)], {0: ()}, Shards(), 2)
    assert isinstance(last, str)
    assert "held by no agent" in last


def test_nothing_is_saved_of_no_step() -> None:
    assert last_checkpoint([report(0, version=0)], {}, Shards(), 1) == "no step was finished yet"


def test_who_holds_the_state_is_asked_for_a_complete_checkpoint_too() -> None:
    """It knows where that lies, and writes nothing."""
    last = last_checkpoint([report(0, checkpoints=(NOW,))], {}, Shards(), 1)
    assert isinstance(last, LastCheckpoint)
    assert (last.target, last.writers) == (NOW, (("", 0),))


# --- the job ------------------------------------------------------------------------------------------------------
def test_survivors_pause_write_and_the_job_ends() -> None:
    desk = training()
    stop = one(desk.exits("w1", step=5), Stop)
    assert stop.generation == desk.controller.generation == 2
    assert desk.controller.stage is Stage.SAVING
    assert desk.controller.is_winding_down
    assert not [c for c in desk.said if isinstance(c, Spawn)]  # no rank is replaced
    order = one(desk.stands("w0", 5), Save)
    assert (order.target, order.rank, order.writers, order.absent, order.derived) == (5, 0, (("", 0),), (1,), ())
    saved(desk)
    error = desk.end().error
    assert error.startswith("1 failures, more than --max-failures 0")
    assert error.endswith(
        "A checkpoint of step 5 was saved as /checkpoints/step: start the same command again to go on"
    )
    made = desk.controller.report()
    assert (made.saved_version, made.saved_path, made.error) == (5, "/checkpoints/step", error)


def test_without_checkpoints_it_ends_at_once() -> None:
    desk = training(every=0)
    desk.exits("w1", step=5)
    assert "checkpoint" not in desk.end().error


def test_it_is_not_decided_before_the_failed_process_is_known_dead() -> None:
    desk = training()
    desk.suspect("w1", step=5)
    assert not [c for c in desk.stands("w0", 5) if isinstance(c, Save)]
    assert one(desk.exits("w1", step=5), Save).target == 5


def test_a_process_that_raised_is_not_killed_if_its_state_may_be_the_last() -> None:
    desk = training()
    event = ev.WorkerFailed(
        process="w1", rank=1, kind="exception", step=5, phase="FORWARD", summary="E", traceback="T", noticed_ns=1,
        stands=True,
    )  # fmt: skip
    said = desk.tell(event)
    assert kinds(said) == [Stop]
    desk.stands("w0", 5)
    order = one(desk.stands("w1", 5), Save)
    assert (order.absent, order.rank) == ((), 0)
    saved(desk)
    assert desk.end().details == "T"


def test_one_that_raised_in_a_write_is() -> None:
    desk = training()
    assert Kill in kinds(desk.raises("w1", "E", step=5))


def test_a_failure_before_the_order_is_one_holder_less() -> None:
    desk = training(world_size=3)
    desk.exits("w1", step=5)
    desk.stands("w2", 5)
    assert one(desk.exits("w0", step=5), Save).writers == (("", 2),)


def test_the_last_holder_is_lost() -> None:
    desk = training()
    desk.exits("w1", step=5)
    desk.exits("w0", step=5)
    assert "No last checkpoint was written: a part of the state was lost" in desk.end().error


def test_a_failure_while_it_is_written_ends_the_job() -> None:
    desk = training(world_size=3)
    desk.exits("w1", step=5)
    desk.stands("w0", 5)
    assert one(desk.stands("w2", 5), Save)
    desk.exits("w2", step=5)
    assert desk.end().error.endswith("No last checkpoint was written: rank 2 failed while it was written")


def test_what_a_worker_could_not_write_ends_the_job() -> None:
    desk = training()
    desk.exits("w1", step=5)
    desk.stands("w0", 5)
    saved(desk, path="", error="rank 0: no space left on device")
    assert desk.end().error.endswith("No last checkpoint was written: rank 0: no space left on device")
    assert desk.controller.report().saved_version == -1


def test_it_takes_no_longer_than_its_limit() -> None:
    desk = training()
    desk.exits("w1", step=5)
    desk.stands("w0", 5)
    before = desk.now
    (end,) = [c for c in desk.wait(SAVE_SECONDS + 1) if isinstance(c, EndJob)]
    assert "it was not done within 600 s" in end.error
    assert before < desk.now


def test_who_is_told_to_end_by_a_signal_saves_and_does_not_wait_for_a_second_one() -> None:
    desk = training()
    desk.exits("w1", step=5)
    assert desk.tell(ev.ShutdownRequested(reason="SIGTERM", after_step=True)) == ()
    desk.tell(ev.ShutdownRequested(reason="SIGINT"))
    assert desk.end().error.endswith("No last checkpoint was written: SIGINT")


def test_a_successor_of_the_controller_begins_again() -> None:
    desk = training()
    desk.exits("w1", step=5)
    desk.stands("w0", 5)
    said = desk.tell(ev.ControllerRestarted())
    assert one(said, Stop).generation == 3
    assert desk.controller.saving_order is None
    assert one(desk.stands("w0", 5), Save).generation == 3


def test_an_old_word_of_success_does_not_count() -> None:
    desk = training()
    desk.exits("w1", step=5)
    desk.stands("w0", 5)
    desk.tell(ev.ControllerRestarted())
    desk.tell(ev.Saved(process="w0", generation=2, version=5, path="/checkpoints/step"))
    assert desk.controller.stage is Stage.SAVING


def test_no_replacement_is_to_be_had() -> None:
    desk = training(max_failures=None)
    desk.exits("w1", step=5)
    for _ in range(3):
        (standby,) = desk.controller.members.standbys()
        desk.raises(standby.name, "ImportError: numpy")
        desk.exits(standby.name, status=1)
    assert desk.controller.stage is Stage.SAVING
    assert not desk.controller.members.standbys()
    assert one(desk.stands("w0", 5), Save).absent == (1,)


def test_a_replacement_that_holds_nothing_yet_is_not_waited_for() -> None:
    desk = training(standbys=1, max_failures=1)
    desk.warm("w2")
    desk.exits("w1", step=5)  # w2 takes its place
    assert desk.controller.rank_processes()[1] == "w2"
    desk.exits("w2", step=5)
    assert desk.controller.stage is Stage.SAVING
    assert one(desk.stands("w0", 5), Save).absent == (1,)


@pytest.mark.parametrize("kind", ["usage"])
def test_misuse_of_relight_is_not_saved(kind: str) -> None:
    desk = training()
    desk.raises("w1", "UsageError: E", step=5, kind=kind)
    assert "checkpoint" not in desk.end().error
    assert not [c for c in desk.said if isinstance(c, Notice)]


def test_a_rank_that_does_not_pause_is_killed_and_the_others_save() -> None:
    """It hung where no rank is judged by progress: only the end of its time tells."""
    desk = training(world_size=3)
    desk.exits("w2", step=5)
    desk.stands("w0", 5)
    limit = STOP_TIMEOUT_SECONDS + OUTSIDE_SECONDS + HEARING_SECONDS
    assert killed(desk.wait(limit + 0.1)) == ["w1"]
    save = one(desk.exits("w1", step=5), Save)
    assert (save.target, save.absent) == (5, (1, 2))


def test_private_state_that_goes_with_its_agent_is_not_waited_for() -> None:
    desk = training()
    desk.exits("w1", step=5)
    assert one(desk.stands("w0", 5, derivable=True), Save).derived == ()
    again = desk.tell(ev.AgentJoined(agent="node-0", slots=2))
    assert [type(command) for command in again if isinstance(command, Save | Stop)] == [Stop]
    second = one(desk.stands("w0", 5, derivable=True), Save)
    assert (second.absent, second.derived) == ((1,), (1,))


def test_private_state_that_a_successor_may_have_is_asked_for_again() -> None:
    desk = training()
    desk.exits("w1", step=5)
    order = one(desk.stands("w0", 5), Save)
    assert one(desk.tell(ev.AgentJoined(agent="node-0", slots=2)), Save) == order
    desk.exits("w1", step=5)  # by the dead agent: it comes late
    assert desk.controller.members.private_versions(1) == set()
    desk.exits("w1", None, step=5)  # by its successor, with what lies in the hands of those who live
    assert desk.controller.members.private_versions(1) == {5}
    assert desk.controller.saving_order == order
