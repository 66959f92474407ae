"""Everything that the loop of one process works with, and how these parts are put together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from relight.core.protocol.events import Snapshot
from relight.core.protocol.fault import Action
from relight.training.carried.carried import Carried
from relight.training.checkpoint.checkpointing import Checkpointing
from relight.training.checkpoint.reader import CheckpointReader
from relight.training.checkpoint.snapshots import Snapshots
from relight.training.data.batches import Batches
from relight.training.data.reach import GENERATORS
from relight.training.metrics.scalars import Scalars
from relight.training.process.private import PrivateState
from relight.training.process.runtime import Runtime
from relight.training.publish.publishing import Publishing
from relight.training.state.assignment import Assignment
from relight.training.state.handed.named import attributes_of_state
from relight.training.state.handed.refusals import late_scheduler, refuse_missing_schedulers
from relight.training.state.tracked import TrackedState
from relight.training.state.values.kinds import attributes_of
from relight.training.transaction.transaction import Transaction
from relight.training.worker.lineage import first_lineage
from relight.training.worker.proof.evidence import Evidence, begin_evidence
from relight.training.worker.proof.repeat import RepeatCheck
from relight.training.worker.recovery.code_between import CodeBetween
from relight.training.worker.recovery.recovery import Recovery
from relight.training.worker.recovery.taking import FallbackTiers, StateTaking
from relight.training.worker.step.barrier import Barrier
from relight.training.worker.step.left_gradients import LeftGradients
from relight.training.worker.step.phases import PhaseHooks
from relight.training.worker.step.writes import WriteWatch


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The parts of one worker. The runtime asks it for all that a report must say of them (`Holdings`)."""

    runtime: Runtime
    state: TrackedState
    assignment: Assignment
    batches: Batches
    carried: Carried
    private: PrivateState
    code_between: CodeBetween
    transaction: Transaction
    barrier: Barrier
    recovery: Recovery
    repeat_check: RepeatCheck
    phases: PhaseHooks
    writes: WriteWatch
    snapshots: Snapshots
    checkpointing: Checkpointing
    publishing: Publishing
    scalars: Scalars
    evidence: Evidence | None

    def install(self) -> None:
        """Hook the script's objects, for the time of the loop. Raises UsageError for a scheduler that it lacks."""
        refuse_missing_schedulers(self.state.optimizers, [*self.state.objects.values(), *self.state.per_rank.values()])
        self.writes.install()
        for thing in self.state.objects.values():
            if isinstance(thing, LRScheduler):
                self.writes.wrap_scheduler(thing)
        self.phases.install()
        self.transaction.install()
        if self.state.pipelines and self.runtime.is_standby:  # nothing is rehearsed, so the data has no place yet
            self.batches.start(0, self.assignment.batch_index)

    def remove(self) -> None:
        """Remove the hooks."""
        self.runtime.protection.after_recovery = False
        self.carried.leave()
        self.transaction.remove()
        self.phases.remove()
        self.writes.remove()
        self.batches.close(self.runtime.worker.version, self.assignment.batch_index)

    def is_derivable(self) -> bool:
        """Return whether this rank's private state follows from rank and step."""
        return self.batches.derivable and self.state.rank_private.follows_from_rank and not self.carried.decides

    def doubt_if_lost(self) -> str:
        """Return why to doubt results where a derivable state is lost: it has variables no step needs; empty: none."""
        if not (names := self.carried.names):
            return ""
        return f"{', '.join(names)}: variables that no step needs, lost with the host that kept them for a rank"

    def is_optimizer_at_work(self) -> bool:
        """Inside optimizer.step()."""
        return self.writes.is_optimizer_at_work

    def standing_risk(self, *, recovers: bool = False) -> str:
        """Return why any recovery, or start from here, makes the bits doubtful; empty: none does.

        `recovers`: a recovery is under way.
        """
        risks = [self.batches.stray, self.carried.doubts.risk(recovers=recovers), self.state.attributes.risk()]
        risks.append(late_scheduler(self.writes.new_schedulers, self.state.optimizers, self.state.objects.values()))
        risks += [thing.standing_risk() for thing in _integrations(self.state) if hasattr(thing, "standing_risk")]
        return next(filter(None, risks), "")

    def has_begun_state(self) -> bool:
        """Return whether all tensors are still those with which the code before the newest step began."""
        return self.code_between.has_begun_state()

    def kept_snapshots(self) -> tuple[Snapshot, ...]:
        """Complete ones in this process's memory."""
        return self.snapshots.held()

    def readable_checkpoints(self) -> tuple[int, ...]:
        """Versions of complete ones on disk, newest first."""
        return self.checkpointing.seen()

    def flip(self, action: Action) -> None:
        """Flip a bit of the state: a planned fault."""
        self.state.flip(action)


def take_inventory(
    runtime: Runtime, state: TrackedState, *, data: Any, accumulate: int, short_groups: bool, seed: int, rng: str
) -> Inventory:
    """The parts of this process, for a state that was handed over.

    Args:
        data, accumulate, short_groups, seed, rng: see `Training`.
    """
    assignment = Assignment()
    assignment.follow(state, runtime.rank, runtime.world_size)
    stage = state.division.stages()  # the lineage is one for all stages of a pipeline
    batches = Batches(data, accumulate, seed, rng, runtime.page, stage=stage, short_groups=short_groups)
    runtime.worker.lineage = first_lineage(seed, runtime.world_size, "" if stage else state.replica.layout())
    publishing, scalars = Publishing(runtime, state), Scalars(runtime)
    carried = _carried(runtime, state, batches, data)
    carried.rank_values.is_state, carried.rank_values.see_above = state.attributes.is_state, state.attributes.notice
    carried.rank_values.restore_data = lambda: batches.restore_position(runtime.worker.version, assignment.batch_index)
    private = PrivateState(runtime, state, batches, carried, scalars)
    reader = CheckpointReader(runtime, state, batches, assignment, private)
    checkpointing = Checkpointing(runtime, state, reader, assignment)
    snapshots = Snapshots(runtime, state, assignment)
    transaction = Transaction(state, runtime.protection, carried, batches)
    tiers, between = FallbackTiers(snapshots, checkpointing, publishing), CodeBetween(runtime, state, private, carried)
    taking = StateTaking(runtime, state, batches, assignment, private, tiers, transaction, carried.rank_values, between)
    recovery = Recovery(runtime, state, tiers, taking)
    barrier = Barrier(runtime, state, assignment, private, transaction, recovery, tiers, carried)
    left = LeftGradients(state.optimizers, runtime.notices.doubt, state.gradients, carried.doubts.mentioned)
    inventory = Inventory(
        runtime=runtime,
        state=state,
        assignment=assignment,
        batches=batches,
        carried=carried,
        private=private,
        code_between=between,
        transaction=transaction,
        barrier=barrier,
        recovery=recovery,
        repeat_check=RepeatCheck(runtime, state),
        phases=PhaseHooks(runtime, state),
        writes=WriteWatch(
            state.name_of_writer,
            lambda optimizer: state.identities.name_of(optimizer) is not None,
            barrier.before_write,
            transaction.before_unusual_writes,
            lambda: runtime.protection.in_step,
            left,
        ),
        snapshots=snapshots,
        checkpointing=checkpointing,
        publishing=publishing,
        scalars=scalars,
        evidence=begin_evidence(runtime, state),
    )
    runtime.protection.holdings, runtime.protection.code_between = inventory, between
    _join_integrations(state, carried, transaction)
    state.zero.watch(runtime.protection.gathering)
    if runtime.settings.buddy_every:
        snapshots.ask(runtime.settings.buddy_every)
    return inventory


def _join_integrations(state: TrackedState, carried: Carried, transaction: Transaction) -> None:
    """Tell what an integration has handed over how to show objects of the script's, announce writes, and read hooks."""
    for thing in _integrations(state):
        thing.join_training(carried.show, transaction.before_unusual_writes, carried.made_in)


def _integrations(state: TrackedState) -> list[Any]:
    return [thing for thing in state.per_rank.values() if hasattr(thing, "join_training")]


def _carried(runtime: Runtime, state: TrackedState, batches: Batches, data: Any) -> Carried:
    state.references.add_data(data)
    carried = Carried(
        _kept_otherwise(state, batches),
        runtime.notices.say,
        is_id=lambda number: number in state.slots.by_id,
        is_of_data=batches.holds,
        parts=state.references,
        data=data,
    )
    for thing in (*state.objects.values(), *state.per_rank.values()):
        if (named := attributes_of_state(thing)) is not None and not attributes_of(thing).keys() <= named:
            carried.look_into(thing, named)
    return carried


def _kept_otherwise(state: TrackedState, batches: Batches) -> Callable[[Any], bool]:
    """Return the test for an object that was handed over, or is relight's own."""

    def is_kept_otherwise(thing: Any) -> bool:
        home = type(thing).__module__
        if home.startswith("relight.training.carried."):  # what stands for the value of a name that has none
            return False
        return (
            home.startswith("relight.")
            or state.identities.keeps(thing)
            or (isinstance(thing, GENERATORS) and batches.holds(thing))
        )

    return is_kept_otherwise
