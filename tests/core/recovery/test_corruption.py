"""Outvoted ranks, when replicas of one version differ, and what the controller makes of them."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from relight.core.controller import Stage
from relight.core.job.failing import MAX_CORRUPTIONS
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Restore, Stop
from relight.core.recovery.corruption import describe_difference, outvoted
from tests.core.test_controller import Desk, killed, one

DIGESTS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@given(DIGESTS, st.data())
def test_whoever_is_not_outvoted_holds_what_most_voters_hold(digests: list[int], data: st.DataObject) -> None:
    held = dict(enumerate(digests))
    voters = data.draw(st.sets(st.sampled_from(sorted(held)), min_size=1))
    votes = {value: [rank for rank in voters if held[rank] == value] for value in digests}
    most = {value for value, ranks in votes.items() if len(ranks) >= 2 and len(ranks) > len(voters) - len(ranks)}
    wrong = outvoted(held, voters)
    if wrong is None:
        assert not most
        return
    (right,) = {value for rank, value in held.items() if rank not in wrong}
    assert right not in {held[rank] for rank in wrong}
    assert not wrong or {right} == most


def test_all_agree() -> None:
    assert outvoted({0: 5, 1: 5}, [0, 1]) == ()


def test_two_cannot_tell() -> None:
    assert outvoted({0: 5, 1: 6}, [0, 1]) is None
    assert describe_difference({0: 5, 1: 6, 2: 5}, 7).startswith(
        "the state of version 7 differs between ranks 0, 2; rank 1, and no majority"
    )


def test_ranks_that_a_failure_left_apart_name_it() -> None:
    """Code between two steps with a collective that was cut short, say: that is no corrupted memory."""
    desk = Desk(world_size=2).train()
    desk.tell(ev.BitsDoubted(process="w0", rank=0, step=6, reason="allreduce was cut short"))
    for rank, process in desk.controller.rank_processes().items():
        desk.done(process, **({"state_digest": "other"} if rank else {}))
    error = desk.end().error
    assert "kept alike: rank 0 in step 6: allreduce was cut short. " in error
    assert "corrupted" not in error


def test_a_copy_of_a_wrong_rank_has_no_vote() -> None:
    """Ranks 2 and 3 were restored from rank 1: three against one, but only one of the three stands for itself."""
    digests = {0: 5, 1: 6, 2: 6, 3: 6, 4: 5}
    assert outvoted(digests, [0, 1, 4]) == (1, 2, 3)


def test_one_rank_is_no_majority_over_its_own_copies() -> None:
    """It may be the one that changed, after it was copied from."""
    assert outvoted({0: 6, 1: 5, 2: 5}, [0]) is None


def differs(*digests: int, step: int = 7, rank: int = 0, generation: int = 1) -> ev.StateDiffers:
    return ev.StateDiffers(
        process=f"w{rank}", rank=rank, generation=generation, step=step, digests=digests, noticed_ns=1
    )


def test_the_minority_is_replaced_once_however_many_say_so() -> None:
    desk = Desk(world_size=4, standbys=1).train()
    said = desk.tell(differs(5, 5, 6, 5))
    assert killed(said) == ["w2"]
    assert one(said, Stop).generation == 2
    failure = desk.controller.report().failures[-1]
    assert (failure.kind, failure.rank, failure.step, failure.phase) == ("corruption", 2, 7, "BARRIER")
    assert desk.tell(differs(5, 5, 6, 5, rank=1)) == ()


def test_without_a_majority_the_job_says_so_and_ends() -> None:
    desk = Desk(world_size=2).train()
    desk.tell(differs(5, 6))
    assert "rank 0; rank 1" in desk.end().error
    assert "checkpoint" in desk.end().error


def test_ranks_that_differ_again_and_again_are_a_bug() -> None:
    desk = Desk(world_size=3, standbys=1).train()
    for time in range(MAX_CORRUPTIONS):
        assert desk.controller.stage is Stage.TRAINING
        generation, process = desk.controller.generation, desk.controller.rank_processes()[1]
        desk.tell(differs(5, 6, 5, step=7 + time, generation=generation))
        if time < MAX_CORRUPTIONS - 1:
            desk.exits(process, step=7 + time)
            desk.started()
            desk.recover(7 + time)
            for standby in desk.controller.members.standbys():
                desk.started()
                desk.warm(standby.name)
    assert "so it is a bug" in desk.end().error


def after_a_death(world_size: int) -> Desk:
    """Rank 2 was killed, its replacement holds the copy, and the others have said what they hold."""
    desk = Desk(world_size=world_size, standbys=2).train()
    desk.exits("w2", step=7)
    desk.all_stand(7)
    return desk


def test_a_survivor_that_is_outvoted_after_a_recovery_is_replaced_too() -> None:
    desk = after_a_death(4)
    for rank, process in desk.controller.rank_processes().items():
        desk.restores(process, 7, **({"state_digest": "other"} if rank == 1 else {}))
    assert killed(desk.said) == ["w1"]
    assert one(desk.said, Stop).generation == 3
    assert desk.controller.report().failures[-1].kind == "corruption"


def test_a_copy_that_is_not_what_was_copied_ends_the_job() -> None:
    """Not memory that was corrupted: an object whose load_state_dict does not take in what its state_dict gave."""
    desk = after_a_death(4)
    for rank, process in desk.controller.rank_processes().items():
        desk.restores(process, 7, **({"state_digest": "other"} if rank == 2 else {}))
    assert "halting" in desk.end().error


def test_a_rank_that_is_outvoted_at_the_end_is_replaced() -> None:
    desk = Desk(world_size=3, standbys=1).train()
    for rank, process in desk.controller.rank_processes().items():
        desk.done(process, **({"state_digest": "other"} if rank == 2 else {}))
    assert killed(desk.said) == ["w2"]
    assert one(desk.said, Stop).generation == 2


def test_behind_the_first_step_it_is_the_script() -> None:
    """No rank is replaced, although a majority could tell; what differs is named."""
    desk = Desk(world_size=3, standbys=1).train()
    event = msgspec.structs.replace(differs(5, 6, 5, step=1), tensors=("modules.model.tensors.bias",))
    assert killed(desk.tell(event)) == []
    error = desk.end().error
    assert error.startswith("the state of version 1 differs between ranks 0, 2; rank 1 (first in modules.model.")
    assert "DDP" in error
    assert "no majority" not in error


def test_a_copy_that_was_made_before_the_recovery_began_again_has_no_vote_either() -> None:
    """Rank 2 was copied from rank 1, whose state was wrong, when the controller died; then it has that state too."""
    desk = after_a_death(3)
    desk.tell(ev.ControllerRestarted())
    for process in desk.controller.rank_processes().values():
        desk.stands(process, 7, blank=False, version=7, lineage="lineage 7")
    assert one(desk.said, Restore).targets == ()
    for rank, process in desk.controller.rank_processes().items():
        desk.restores(process, 7, **({"state_digest": "other"} if rank else {}))
    assert "no majority tells which is right" in desk.end().error
