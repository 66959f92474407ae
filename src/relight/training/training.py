"""The training loop: steps that are committed or repeated as a whole.

    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=10_000):
        with step as batch:
            ...forward, backward...
            optimizer.step(); optimizer.zero_grad()

Forward and backward leave parameters alone; the first write waits at the barrier; the end of the block commits.
A failure before the barrier surfaces as an exception inside the block, which the block absorbs; then the same
step is offered again. See docs/PROTOCOL.md.
"""

import ast
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from relight.core.events import StepResumed, TrainingDone, TrainingEntered
from relight.core.fault import Point
from relight.core.position import Phase
from relight.errors import StepInterrupted, UsageError
from relight.training.carried.carried import Carried
from relight.training.carried.source import accumulates_by_hand, lines_of, loops_around, yields_inside
from relight.training.checkpoint.checkpointing import Checkpointing
from relight.training.checkpoint.reader import CheckpointReader
from relight.training.checkpoint.snapshots import Snapshots
from relight.training.connection.page import NO_PRIVATE
from relight.training.data.batches import Batches
from relight.training.data.reach import GENERATORS
from relight.training.job import current_runtime
from relight.training.metrics.scalars import Scalars
from relight.training.process.progress import Progress
from relight.training.publish.publishing import Publishing
from relight.training.state.tracked import TrackedState
from relight.training.step import Step
from relight.training.transaction.transaction import Transaction, listed
from relight.training.worker.barrier import Barrier
from relight.training.worker.evidence import begin_evidence
from relight.training.worker.phases import PhaseHooks
from relight.training.worker.recovery import FallbackTiers, Recovery
from relight.training.worker.repeat import RepeatCheck
from relight.training.worker.writes import WriteWatch
from relight.transfer.io.codec import encode_tree

LOGGERS_SECONDS = 60.0  # to take what is left before the job ends
_CALLED_AGAIN = (
    "training.steps() {}. Only one loop of steps is protected: call it once, for all epochs, "
    "`for step in training.steps(until=epochs * len(loader))`; step.epoch says which epoch a step belongs to, and "
    "code that is due once an epoch goes into the block, in the epoch's last step"
)
_NOT_ENTERED = "the loop took a step but did not enter it: write `with step as batch:` in its body"


class Training:
    """Everything of a training run that must survive.

    Args:
        model: the module (usually wrapped in DDP), or several as a dict.
        optimizer: the optimizer of its parameters, or several as a dict.
        data: a DataLoader, or several (a dict, tuple or list of them), any object whose `__iter__` begins anew each
            time, an object with `state_dict` (StatefulDataLoader), a sequence of batches, or a function
            from the batch's number to the batch. None: the block fetches its own data from `step.number`.
        scheduler: of the learning rate, if there is one.
        scaler: of gradients, for mixed precision.
        ema: averaged weights, anything with `state_dict`.
        accumulate: batches per step. With more than one, `with step as batches` yields a list.
        seed: of the random streams; every step starts with streams derived from (seed, step, rank). None: that of
            `relight run --seed`.
        rng: "step" for that, or "preserve" to let the script's own streams run on from step to step.
        per_rank: objects with `state_dict` whose state differs between ranks.
        pipeline: the schedule (of torch.distributed.pipelining) that the step runs, or a list of them; `model` is then
            the module of this rank's stage, or a dict of those of its stages.
        stateful: any other objects with `state_dict` that hold the same state on every rank.

    Raises:
        UsageError: an object cannot be tracked; the message names it and says what to do.
    """

    def __init__(
        self,
        *,
        model: nn.Module | dict[str, nn.Module],
        optimizer: Optimizer | dict[str, Optimizer],
        data: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        accumulate: int = 1,
        seed: int | None = None,
        rng: str = "step",
        per_rank: dict[str, Any] | None = None,
        pipeline: Any = None,
        **stateful: Any,
    ) -> None:
        runtime = self._runtime = current_runtime()
        self._looked_at_block = False
        self._built_at = lines_of(sys._getframe(1))
        companions = {"scheduler": scheduler, "scaler": scaler, "ema": ema}
        self._state = TrackedState(
            modules=dict(model) if isinstance(model, dict) else {"model": model},
            optimizers=dict(optimizer) if isinstance(optimizer, dict) else {"optimizer": optimizer},
            objects={**{name: thing for name, thing in companions.items() if thing is not None}, **stateful},
            per_rank=per_rank or {},
            pipeline=pipeline,
        )
        stages = self._state.stages()
        if stages:
            runtime.runs_other_modules()
        if stages and not runtime.builds_late:
            raise UsageError(
                "ranks build different stages of a pipeline, so a standby must know which rank it takes before it "
                "builds anything: relight.init(late_standby=True)"
            )
        if runtime.builds_late and runtime.guessed and not stages and runtime.rank == 0 and not runtime.is_standby:
            runtime.say(
                "late standby",
                "the script imports torch.distributed.pipelining and hands over no pipeline: standbys build when they "
                "know their rank, for nothing, and recoveries take that much longer. Say "
                "relight.init(late_standby=False), or True if ranks build different things",
            )
        # A standby that knows its rank makes whichever groups that one makes.
        if not runtime.builds_late and (obstacle := runtime.table.obstacle()):
            raise UsageError(obstacle)
        self._find_place()
        seed = runtime.settings.seed if seed is None else seed
        self._batches = Batches(data, accumulate, seed, rng, runtime.page, stage=stages)
        birth = f"{seed}/{runtime.world_size}/{'' if stages else self._state.layout()}"  # one for all stages
        lineage = xxhash.xxh3_64_hexdigest(birth.encode())
        self._progress = Progress(lineage=lineage, cap=runtime.settings.stop_after)
        self._evidence = begin_evidence(runtime, self._state)
        self._publishing = Publishing(runtime, self._state, self._progress)
        self._scalars = Scalars(runtime, self._progress)
        reader = CheckpointReader(
            runtime,
            self._state,
            self._progress,
            self._batches,
            lambda: self._shard,
            lambda: self._place,
            self._adopt_carried,
        )
        self._carried = Carried(
            self._is_kept_otherwise,
            runtime.say,
            is_id=lambda number: number in self._state.slots.by_id,
            is_of_data=self._batches.holds,
        )
        self._checkpointing = Checkpointing(runtime, self._state, self._progress, reader, lambda: self._shard)
        self._snapshots = Snapshots(runtime, self._state, self._progress, lambda: self._shard)
        self._transaction = Transaction(self._state, lambda: runtime.launches, self._carried.look)
        self._barrier = Barrier(
            runtime,
            self._progress,
            self._prepare,
            self._passed,
            self._state,
            lambda: self._shard,
            self._snapshots,
            self._transaction,
        )
        self._recovery = Recovery(
            runtime,
            self._state,
            self._progress,
            self._batches,
            lambda: self._place,
            FallbackTiers(
                self._snapshots, self._checkpointing, self._publishing, self._keep_private, self._adopt_carried
            ),
            self._transaction,
        )
        self._repeat_check = RepeatCheck(runtime, self._state, self._progress)
        self._phases = PhaseHooks(runtime, self._state, self._progress)
        self._writes = WriteWatch(self._state.name_of, self._barrier.before_write, lambda: runtime.in_step)
        if runtime.settings.buddy_every:
            self._snapshots.ask(runtime.settings.buddy_every)
        self._fingerprint: tuple[Any, ...] | None = None
        self._state.zero.watch(runtime.gathering)
        runtime.is_optimizer_at_work = lambda: self._writes.is_optimizer_at_work
        runtime.faults.flip = self._state.flip
        runtime.standing_risk = lambda: self._batches.stray or self._carried.risk()
        runtime.derivable = lambda: (
            self._batches.derivable and self._state.follows_from_rank and not self._carried.decides
        )

    @property
    def version(self) -> int:
        """Optimizer steps applied to the state."""
        return self._progress.version

    def publish(
        self,
        *,
        every: int | None = None,
        model: str | None = None,
        rename: Callable[[str, str], str] | None = None,
        stall_timeout_seconds: float = 5.0,
    ) -> None:
        """Put the model's weights into every `relight.Receiver` that was given this run's directory.

        With `every`: after every so many steps, and at the end; call it before the loop. Without: once, at the next
        boundary between two steps. Buckets travel while the next step computes; its write waits for the last one to
        be read, for `stall_timeout_seconds` at most: then the update is given up. Engines answer with a version only
        once every rank is known to hold it. An engine that is silent for so long is dropped; publishing never fails
        the training. Call it on every rank: where weights are divided over ranks (FSDP2, tensor parallelism,
        pipelines), each writes the parts that it holds, and engines get whole tensors, those of all stages.

        Args:
            model: which, if `Training` was given several. Without it in a pipeline: those that stages run.
            rename: what engines call a tensor, `rename(model, name)`; without it, by its own name, `name`. Needed if
                stages have tensors of the same name.

        Raises:
            UsageError: no such model, every < 1, two tensors of one name, or a tensor that cannot be moved.
        """
        self._publishing.ask(every, model, rename, stall_timeout_seconds)

    def log_to(self, logger: Any) -> None:
        """Log what `step.report` is given, on rank 0: each committed step once, also when rank 0 is replaced.

        Call it before the loop, on every rank. Values are also written to `scalars.jsonl` in the run directory. Loggers
        work in a thread: a slow one delays no step, and one that fails is named and left out.

        Args:
            logger: "tensorboard" (into the run directory), "wandb" (a run with the job's name, in the project that
                WANDB_PROJECT names), or a function that makes a logger, called on rank 0 alone:
                `lambda: SummaryWriter("logs")`, `lambda: wandb.init(project="p", id="x", resume="allow")`. A logger has
                `add_scalar(name, value, step)`, `log_metrics(values, step)` or `log(values, step=...)`. One that is
                made already will do, but then every rank and every standby makes one.

        Raises:
            UsageError: it is none of these, or not installed.
        """
        if not self._runtime.settings.evidence:  # it is no run of which anybody wants curves
            self._scalars.log_to(logger)

    def checkpoint(self, directory: str | Path, *, every: int, keep: int = 2, resume: bool = True) -> None:
        """Write a checkpoint after every so many steps, and at the end; start from the newest one there is.

        Call it before the loop. With this, a job that ended (every replica lost, the cluster gone, Ctrl-C) goes on
        where its last checkpoint was made when it is started again, with the bits of a run that never ended. Also, if
        neither replicas nor buddies have all of the state, the ranks of a running job go back to it. While a replica
        of every part lives, recoveries never read one. Rank 0, or the first holder of each part of a divided state,
        copies it between two steps, and a thread writes the copy, in the format of torch.distributed.checkpoint; a
        checkpoint appears in the directory when all of it is on the disk. What goes wrong while writing is told and
        does not fail the training. Where the state is divided, a job of another layout can start from it.

        Args:
            directory: on a file system that all hosts share.
            every: steps.
            keep: complete checkpoints; older ones are removed.
            resume: False: start anew; then the directory must hold no checkpoint.

        Raises:
            UsageError: every or keep < 1.
        """
        self._checkpointing.ask(directory, every, keep, resume)

    def buddy(self, *, every: int) -> None:
        """Keep snapshots of a divided state in the host memory of other ranks, for when a part has no holder left.

        Call it before the loop, on every rank. After every so many steps each rank copies its part of the state into
        host memory, and another rank, its buddy, on another host if there is one, fetches that copy in the background.
        If all holders of a part are lost, all ranks go back to the newest version of which there is a snapshot of
        every part: at most `every` steps, and those during which that version was on its way, are computed again. While
        each part has a holder, recoveries never use one.

        Memory, on each rank's host: four times the rank's part of the state (two snapshots of its own, two that it
        keeps for its ward). Where every rank holds all of the state (plain DDP) a buddy would hold nothing that others
        do not, and nothing is copied. `relight run --buddy-every K` does the same for a script that does not call this.

        Args:
            every: steps.

        Raises:
            UsageError: every < 1.
        """
        self._snapshots.ask(every)

    def carry(self, *things: Any, ignore: Sequence[str] = ()) -> None:
        """Say what the script itself carries from step to step, where relight does not find it.

        relight finds such names by itself, and keeps them: variables that a step reads before it writes them, and that
        an earlier step wrote. Call this before the loop, on every rank.

        Args:
            things: names, as the function that holds the loop sees them (`"hidden"`, `"self.baseline"`), or objects
                whose contents change: lists, dicts, deques, tensors, generators of random numbers, objects of a class
                of yours.
            ignore: names that are not to be carried, since no step depends on them.

        Raises:
            UsageError: an object of a kind that cannot be carried.
        """
        self._carried.declare(*things, ignore=ignore)

    def steps(self, until: int) -> Iterator[Step]:
        """Offer steps until `until` of them are committed, in total, on every rank.

        What stands above `with step` in the loop's body belongs to the step, and is run again with it. Code after the
        block may evaluate, log and save, but must not change what was handed over; guard it with `step.committed`,
        since it also runs after a step that a failure interrupted.
        """
        if until < 1:
            raise UsageError(f"steps(until={until}): at least one step")
        if self._runtime.has_begun:
            raise UsageError(_CALLED_AGAIN.format("was called a second time in this process"))
        if place := loops_around(sys._getframe(1), self._built_at):
            raise UsageError(_CALLED_AGAIN.format(f"stands inside another loop ({place})"))
        self._runtime.has_begun = True
        return self._steps(until)

    def _steps(self, until: int) -> Iterator[Step]:
        self._progress.until = until
        self._install()
        try:
            if self._runtime.is_standby:
                yield from self._stand_by()
            else:
                self._enter_training()
            while True:
                yield from self._offer()
                if self._finish():
                    if self._progress.version < self._progress.until:
                        raise SystemExit(0)  # what the script does after training is not due yet
                    doubt = self._carried.turn(sys._getframe())  # for the code after the loop
                    if doubt := doubt or self._carried.end(computed=self._progress.commits > 0):
                        self._runtime.doubt(doubt)
                    return
        except GeneratorExit:
            # Either `break` (early stopping; every rank must do so after the same step), or an exception on its way
            # out of the loop. Which one shows when the script ends: `bootstrap` then calls `at_end`, or reports.
            self._progress.until = self._progress.version
            self._runtime.at_end = self._leave_early
            raise
        finally:
            self._uninstall()

    # --- the loop ---------------------------------------------------------------------------------------------
    def _offer(self) -> Iterator[Step]:
        runtime, progress = self._runtime, self._progress
        while progress.version < progress.goal:
            if runtime.closed:
                self._recover()
                continue
            self._refuse_changes_between_steps()
            self._begin_turn()
            self._show_position()
            self._publishing.between_steps()
            self._checkpointing.between_steps()
            self._snapshots.between_steps()
            runtime.faults.strike(Point.BETWEEN_STEPS)
            if runtime.page.asked_to_leave:
                runtime.leave()
            step = Step(self, progress.version, progress.attempt)
            yield step
            if not step.entered:
                raise UsageError(_NOT_ENTERED)

    def _begin_turn(self) -> None:
        """The loop asks for a step: a failed attempt goes back to here. Code above the block runs again with it."""
        progress = self._progress
        doubt = self._carried.turn(sys._getframe())
        if doubt is not None and not progress.warming:
            self._runtime.doubt(doubt)
        if not progress.warming and self._carried.needs_keeping:
            self._keep_private(progress.version)
        self._carried.remember()
        if self._carried.computes_above:
            self._batches.begin_turn(progress.version, self._place)
        if progress.warming:
            self._state.attributes.begin(learning=True)  # also what is changed in place is undone
        else:
            self._state.see_gradients()
            self._transaction.begin()

    def enter_step(self, step: Step) -> Any:
        """`with step`: FORWARD begins with drawing the batch."""
        runtime, progress = self._runtime, self._progress
        progress.passed = progress.wrote = False
        progress.started = -1 if progress.warming else progress.version
        runtime.page.put("prepared", -1)
        runtime.in_step = True
        self._writes.begin_step()
        runtime.page.stamp(Phase.FORWARD)
        progress.forward_ns = time.monotonic_ns()
        self._scalars.begin_step()
        self._recovery.begin_step()
        self._carried.enter(sys._getframe(2))
        if not self._looked_at_block:
            self._look_at_block(sys._getframe(2))
        if progress.warming:
            return self._batches.rehearse(self._place)
        batch = self._batches.get(step.number, self._place)
        if self._evidence is not None:
            self._evidence.begin(step.number)
        return batch

    def _look_at_block(self, frame: FrameType) -> None:
        """Before anything is computed: refuse what the code of the block shows to be wrong."""
        self._looked_at_block = True
        if place := yields_inside(frame):
            raise UsageError(
                f"{place}: `with step` in a generator, around a `yield`. A failure that strikes while the code that "
                "iterates over the generator runs does not reach the block: put `with step` into that code"
            )

        def is_optimizer(expression: ast.expr) -> bool:
            name = expression.id if isinstance(expression, ast.Name) else ""
            value = frame.f_locals.get(name, frame.f_globals.get(name))
            return self._state.name_of(value) in self._state.optimizers

        if place := accumulates_by_hand(frame, is_optimizer):
            raise UsageError(
                f"{place} calls optimizer.step() in some steps only, while every step adds to the gradients: gradients "
                "that are carried from step to step are lost with a failure. Put the whole accumulation into one step: "
                "relight.Training(..., accumulate=K), and one optimizer.step() for each"
            )

    def exit_step(self, step: Step, error: BaseException | None) -> bool:
        """The end of the block: commit, or absorb what a failure elsewhere caused, or let the script's error pass."""
        if self._evidence is not None:
            self._evidence.end()
        try:
            if error is None:
                self._complete(step)
                return False
        except Exception as broken:
            if step.committed or not self._is_interruption(broken):
                raise
            error = broken
        else:
            if not isinstance(error, Exception) or not self._is_interruption(error) or self._progress.warming:
                return False
        finally:
            self._runtime.in_step = False
        _drop_frames(error)
        self._give_up_attempt()
        self._carried.roll_back()
        self._recover()
        return True

    def _give_up_attempt(self) -> None:
        """The step under way will be undone, if it can be."""
        progress = self._progress
        if progress.passed:
            self._tear(
                f"step {progress.version} was interrupted after its write, by a collective that it waited for there"
            )
        elif changed := self._transaction.unimaged_changes():
            self._tear(
                f"step {progress.version} was interrupted, and {listed(changed)} had changed before its write for the "
                "first time in many steps, so nothing was kept to undo that"
            )

    def _tear(self, reason: str) -> None:
        """This rank's state is worth nothing until it is copied from another one's."""
        self._runtime.torn = True
        self._runtime.say(
            "torn",
            f"rank {self._runtime.rank}: {reason}. It is restored from an intact rank; if there is none, the job "
            "goes back to buddy memory or a checkpoint, or ends",
        )

    def _complete(self, step: Step) -> None:
        runtime, progress, transaction = self._runtime, self._progress, self._transaction
        if progress.warming:
            self._carried.roll_back()
            return
        trained = progress.wrote or transaction.wrote_parameters
        progress.stepped |= trained
        if not trained:
            self._warn_of_pending_gradients()
        if not progress.passed and self._is_to_be_repeated():
            return
        if progress.passed:
            self._recovery.before_barrier()  # of the next step: a wrapper may have been used for the first time since
        self._barrier.at_end()
        runtime.synchronize()
        runtime.faults.strike(Point.AFTER_WRITE)
        progress.advance(runtime.world_size)
        progress.commits += 1
        transaction.commit()
        if transaction.surprise:
            self._note_surprise(step.number)
        self._carried.commit()
        runtime.page.commit(progress.version, progress.commits)
        step.committed = True
        runtime.in_step = False
        self._batches.done()
        if stray := self._batches.stray:
            runtime.say("stray", f"rank {runtime.rank}: {stray}. Hand the DataLoader over: relight.Training(data=...)")
        self._fingerprint = self._state.fingerprint()
        runtime.page.stamp(Phase.OUTSIDE)
        self._scalars.commit(step.number)
        if self._evidence is not None:
            self._evidence.commit(step.number, runtime.rank, runtime.generation, step.attempt)
        self._report_first_commit(step)
        runtime.faults.strike(Point.AFTER_STEP)
        progress.attempt = int(progress.version < progress.begun_before)
        if progress.restore is not None or runtime.closed:  # a recovery decided to finish this step, or waits for it
            self._recover()

    def _is_to_be_repeated(self) -> bool:
        """Once, early in a job: undo the step and have it computed again, to see whether the bits are the same."""
        self._runtime.await_launched()
        if not self._repeat_check.wants_another():
            return False
        self._transaction.roll_back()
        self._state.clear_gradients()
        self._carried.roll_back()
        self._runtime.page.stamp(Phase.OUTSIDE)
        self._progress.attempt += 1
        return True

    def _note_surprise(self, number: int) -> None:
        """After an early barrier came what used not to come there: all is well, unless a failure struck just then."""
        surprise, runtime = self._transaction.surprise, self._runtime
        self._keep_private(self._progress.version)
        runtime.say(
            "surprise",
            f"rank {runtime.rank}: in step {number}, {surprise} came after the last write, where none had come before. "
            f"From step {number + 2} on such steps are protected to their end",
        )
        reason = f"a failure struck in step {number}, in which {surprise} came unexpectedly after the last write"
        if runtime.closed or self._progress.restore is not None:
            runtime.doubt(reason)
        runtime.doubt_if_lost_after(number, reason)

    def _recover(self, *, blank: bool = False) -> None:
        self._progress.last = None  # others may not have heard of it: the next barrier says it to all
        self._recovery.run(blank=blank)
        while not self._gather():
            self._recovery.run()
        self._transaction.reset()
        self._phases.open_gates()
        self._publishing.confirm(self._progress.version)
        self._scalars.catch_up()
        self._fingerprint = self._state.fingerprint()
        self._show_position()

    def _gather(self) -> bool:
        """Get the parameters that other ranks update (ZeRO): not all may have come before the failure.

        Only what a rank updates itself belongs to its state, so a failure in here is one like any other. False: it
        struck.
        """
        self._state.zero.gather()
        return not self._state.zero or not self._runtime.closed

    def _is_interruption(self, error: Exception) -> bool:
        """Whether this exception comes from a failure elsewhere rather than from the script."""
        if isinstance(error, UsageError):
            return False
        if isinstance(error, StepInterrupted):
            return True
        if not isinstance(error, (RuntimeError, OSError)):
            return False
        runtime = self._runtime
        summary = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if isinstance(error, dist.DistBackendError):
            return runtime.await_stop(summary)
        return runtime.await_verdict(summary)

    def _find_place(self) -> None:
        """Of the rank that this process holds: its part of the state, and which of a step's batches is its own."""
        runtime = self._runtime
        self._shard = self._state.shard(runtime.world_size)
        self._place = self._state.batch_place(runtime.rank, runtime.world_size)

    def _prepare(self, early: bool) -> None:
        """Whatever the step needs of other ranks is here: keep the private state with which the next step starts."""
        self._recovery.before_barrier()
        self._transaction.prepare(early=early)
        self._keep_private(self._progress.version + 1)
        self._publishing.before_barrier()

    def _passed(self) -> None:
        """Every rank is prepared, or it was decided to finish this step: all of them hold its version."""
        self._publishing.confirm(self._progress.version)
        self._publishing.before_write()
        self._snapshots.before_write()

    def _is_kept_otherwise(self, thing: Any) -> bool:
        """Whether it was handed over, or is relight's own."""
        home = type(thing).__module__
        if home.startswith("relight.training.carried."):  # what stands for the value of a name that has none
            return False
        is_drawn_from = isinstance(thing, GENERATORS) and self._batches.holds(thing)
        return home.startswith("relight.") or self._state.keeps(thing) or is_drawn_from

    def _adopt_carried(self, tree: dict[str, Any], version: int) -> None:
        doubt = self._carried.adopt(tree.get("carried"))
        if doubt is not None:
            self._runtime.doubt(doubt, step=version - 1)

    def _keep_private(self, version: int) -> None:
        carried = self._carried.capture()
        is_bare = not carried and not self._scalars.has_private
        if is_bare and self._batches.derivable and not self._state.has_private:
            payload = NO_PRIVATE  # mostly
        else:
            tree = {**self._state.private(), **self._batches.private(), **self._scalars.private()}
            if carried:
                tree["carried"] = carried
            payload = encode_tree(tree, "rank-private state")
        self._runtime.page.write_private(version, payload)

    # --- entering and leaving ---------------------------------------------------------------------------------
    def _enter_training(self) -> None:
        runtime, progress = self._runtime, self._progress
        if self._checkpointing.resume():
            self._state.zero.gather()
        else:
            self._batches.start(0, self._place)
        self._keep_private(progress.version)
        runtime.started = True
        runtime.link.send(
            TrainingEntered(
                process=runtime.process,
                rank=runtime.rank,
                version=progress.version,
                layout_digest=self._state.layout(),
                state_digest=self._state.digest(),
                until=progress.until,
                shard=self._shard,
                state_bytes=self._state.parameter_bytes(),
                buddy_every=self._snapshots.every if self._snapshots.active else 0,
                checkpoint_every=self._checkpointing.every,
            ),
            report=True,
        )
        begin = runtime.await_begin()
        progress.began = progress.agreed = progress.version if begin is not None else -1  # all with the same state
        self._stay_if_it_fails()
        if begin is not None and not runtime.closed:
            self._snapshots.assign(begin.buddies)
            self._checkpointing.assign(begin.writers)
        self._show_position()

    def _stand_by(self) -> Iterator[Step]:
        """A standby: rehearse one step alone, wait for a rank (unless it has one, and builds late), be restored."""
        runtime = self._runtime
        runtime.started = not runtime.builds_late  # else a Stop may come at any time, and would cut the rehearsal short
        if not self._state.pipelines:  # a stage alone has no input
            runtime.faults.strike(Point.WARMUP)
            yield from self._rehearse()
        if not runtime.builds_late:
            runtime.stand_by(self._state.layout())
            self._state.rebind()
            self._find_place()
        runtime.faults.strike(Point.PROMOTED)
        runtime.closed = True
        runtime.started = True
        self._recover(blank=True)
        self._stay_if_it_fails()

    def _stay_if_it_fails(self) -> None:
        """From now on this process has state of which a last checkpoint can be made."""
        if self._checkpointing.every:
            self._runtime.stay = self._recovery.stay

    def _rehearse(self) -> Iterator[Step]:
        """A step of which nothing is kept: the script compiles, allocates, and shows DDP its order."""
        self._progress.warming = True
        self._begin_turn()
        step = Step(self, 0, 0, warmup=True)
        yield step
        if not step.entered:
            raise UsageError(_NOT_ENTERED)
        self._progress.warming = False
        self._state.attributes.roll_back()

    def _finish(self) -> bool:
        """All steps are committed here: True once that holds everywhere, False if a recovery sent this rank back."""
        runtime, progress = self._runtime, self._progress
        if runtime.closed:
            self._recover()
            if progress.version < progress.goal:
                return False
        runtime.page.stamp(Phase.DONE)
        self._warn_of_nothing_trained()
        runtime.link.send(
            TrainingDone(
                process=runtime.process,
                rank=runtime.rank,
                generation=runtime.generation,
                version=progress.version,
                lineage=progress.lineage,
                state_digest=self._state.digest(),
                cut_collectives=runtime.cut_collectives,
                doubts=len(runtime.doubts),
            ),
            report=True,
        )
        if runtime.await_release():
            runtime.stay = None  # nobody will order a last checkpoint any more: who fails now ends
            self._publishing.finish()
            self._scalars.finish(LOGGERS_SECONDS)
            self._checkpointing.finish()
            runtime.started = False
            return True
        self._recover()
        return False

    def _leave_early(self) -> None:
        while not self._finish():
            pass

    def _install(self) -> None:
        self._writes.install()
        for thing in self._state.objects.values():
            if isinstance(thing, LRScheduler):
                self._writes.wrap_scheduler(thing)
        self._phases.install()
        self._transaction.install()

    def _uninstall(self) -> None:
        self._carried.leave()
        self._transaction.remove()
        self._phases.remove()
        self._writes.remove()
        self._batches.close()

    # --- what people see --------------------------------------------------------------------------------------
    def epoch_of(self, step: int) -> int:
        return self._batches.epoch(step)

    def report(self, loss: torch.Tensor | float | None, values: dict[str, torch.Tensor | float]) -> None:
        if self._progress.warming:
            return
        self._scalars.report(values if loss is None else {"loss": loss, **values})
        if loss is not None:
            self._show_loss(loss)

    def _show_loss(self, loss: torch.Tensor | float) -> None:
        runtime = self._runtime
        if isinstance(loss, torch.Tensor):
            if loss.device.type != "cpu":
                return
            loss = float(loss.detach())
        runtime.page.report_loss(loss)
        if math.isnan(loss):
            runtime.say(
                "nan",
                f"rank {runtime.rank}: the loss of step {self.version} is NaN. Training goes on: the same bits would "
                "give NaN again, so no recovery helps; look at the learning rate, or clip gradients",
            )

    def _show_position(self) -> None:
        runtime, progress = self._runtime, self._progress
        runtime.page.put("step", progress.version)
        runtime.page.put("version", progress.version)
        runtime.page.put("attempt", progress.attempt)
        runtime.faults.step, runtime.faults.attempt = progress.version, progress.attempt
        if runtime.page.phase is not Phase.OUTSIDE:
            runtime.page.stamp(Phase.OUTSIDE)

    def _report_first_commit(self, step: Step) -> None:
        runtime, progress = self._runtime, self._progress
        if not progress.first_after_recovery:
            return
        progress.first_after_recovery = False
        runtime.link.send(
            StepResumed(
                process=runtime.process,
                rank=runtime.rank,
                generation=runtime.generation,
                step=step.number,
                resumed_ns=progress.resumed_ns,
                forward_ns=progress.forward_ns,
                commit_ns=time.monotonic_ns(),
            )
        )

    def _warn_of_pending_gradients(self) -> None:
        if self._state.has_gradients():
            self._runtime.say(
                "accumulate",
                "a step ended with gradients but without optimizer.step(): gradients carried from step to step are "
                "lost with a failure. Put the whole accumulation into one step: relight.Training(..., accumulate=K)",
            )
            self._runtime.doubt_if_lost_after(
                self.version,
                "a step ended with gradients but without optimizer.step(), and a recovery threw them away. Put the "
                "whole accumulation into one step: relight.Training(..., accumulate=K)",
            )

    def _warn_of_nothing_trained(self) -> None:
        if self._progress.commits and not self._progress.stepped and self._state.has_gradients():
            self._runtime.say(
                "nothing trained",
                f"{self._progress.commits} steps had gradients, and none of them called optimizer.step(): the model is "
                "what it was at the start",
            )

    def _refuse_changes_between_steps(self) -> None:
        if self._fingerprint is None:
            return
        changed = self._transaction.changed_between_steps() if self._carried.computes_outside else []
        names = ["parameters"] if any(key in self._state.slots.parameters for key in changed) else []
        names += [f"buffer {listed(changed)}"] if changed and not names else []
        found = self._state.fingerprint()
        pairs = zip(
            ("parameters of an optimizer's groups", "learning rate", "scheduler"), self._fingerprint, found, strict=True
        )
        names += [name for name, before, now in pairs if before != now]
        if names:
            raise UsageError(
                f"{names[0]} changed between step {self.version - 1} and step {self.version}, after `with step`: move "
                "that code into the block, after optimizer.step(), or a replacement would not have the change"
            )


def _drop_frames(error: BaseException) -> None:
    """They hold the broken group and the activations of the aborted step; also those of what it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
