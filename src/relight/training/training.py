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

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from relight.errors import UsageError
from relight.training.carried.source import lines_of, loops_around
from relight.training.job import current_runtime
from relight.training.process.runtime import Runtime
from relight.training.state.tracked import TrackedState
from relight.training.step import Step
from relight.training.worker.inventory import take_inventory
from relight.training.worker.loop import StepLoop

_CALLED_AGAIN = (
    "training.steps() {}. Only one loop of steps is protected: call it once, for all epochs, "
    "`for step in training.steps(until=epochs * len(loader))`; step.epoch says which epoch a step belongs to, and "
    "code that is due once an epoch goes into the block, in the epoch's last step"
)


class Training:
    """Everything of a training run that must survive.

    Args:
        model: the module (usually wrapped in DDP), or several as a dict.
        optimizer: the optimizer of its parameters, or several as a dict.
        data: a DataLoader, or several (a dict, tuple or list of them), any object whose `__iter__` begins anew each
            time, an object with `state_dict` (StatefulDataLoader), a sequence of batches, or a function
            from the batch's number to the batch. None: the block fetches its own data by `step.number`.
        scheduler: the scheduler of the learning rate, if there is one.
        scaler: the gradient scaler, for mixed precision.
        ema: averaged weights, any object with `state_dict`.
        accumulate: batches per step. With more than one, `with step as batches` yields a list.
        seed: seed of the random streams; every step starts with streams derived from (seed, step, rank). None: that of
            `relight run --seed`.
        rng: "step" for such streams, or "preserve" to let the script's own streams continue from step to step.
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
        self._built_at = lines_of(sys._getframe(1))
        companions = {"scheduler": scheduler, "scaler": scaler, "ema": ema}
        state = TrackedState(
            modules=dict(model) if isinstance(model, dict) else {"model": model},
            optimizers=dict(optimizer) if isinstance(optimizer, dict) else {"optimizer": optimizer},
            objects={**{name: thing for name, thing in companions.items() if thing is not None}, **stateful},
            per_rank=per_rank or {},
            pipeline=pipeline,
        )
        _refuse_what_standbys_cannot_build(runtime, staged=bool(state.stages()))
        seed = runtime.settings.seed if seed is None else seed
        self._parts = take_inventory(runtime, state, data=data, accumulate=accumulate, seed=seed, rng=rng)
        self._loop = StepLoop(self._parts)

    @property
    def version(self) -> int:
        """Number of optimizer steps applied to the state."""
        return self._parts.progress.version

    def publish(
        self,
        *,
        every: int | None = None,
        model: str | None = None,
        rename: Callable[[str, str], str] | None = None,
        stall_timeout_seconds: float = 5.0,
    ) -> None:
        """Put the model's weights into every `relight.Receiver` that names this run's directory.

        With `every`: at the start, after every `every` steps, and at the end; call it before the loop. Without: once,
        at the next boundary between two steps. Buckets travel while the next step computes. The step's write waits
        until the last bucket has been read, for at most `stall_timeout_seconds`; then the update is abandoned. Engines
        answer with a version only once every rank is known to hold it. An engine that is silent for the same time is
        dropped; publishing never fails the training. Call it on every rank: where weights are divided over ranks
        (FSDP2, tensor parallelism, pipelines), each rank writes the parts that it holds, and engines get whole tensors
        of all stages.

        Args:
            every: number of steps from one update to the next.
            model: name of the model, if `Training` has several. Default in a pipeline: all that stages run.
            rename: function that gives each tensor its name in the engines, `rename(model, name)`. Default: `name`.
                Needed if stages have tensors of the same name.
            stall_timeout_seconds: time limit for a bucket.

        Raises:
            UsageError: no such model, every < 1, two tensors of one name, or a tensor that cannot be moved.
        """
        self._parts.publishing.ask(every, model, rename, stall_timeout_seconds)

    def log_to(self, logger: Any) -> None:
        """Log the values of `step.report` on rank 0: each committed step once, also when rank 0 is replaced.

        Call it before the loop, on every rank. Values are also written to `scalars.jsonl` in the run directory. Loggers
        work in a thread: a slow one delays no step, and one that fails is named and left out.

        Args:
            logger: "tensorboard" (into the run directory), "wandb" (a run with the job's name, in the project that
                WANDB_PROJECT names), or a function that makes a logger, called on rank 0 alone:
                `lambda: SummaryWriter("logs")`, `lambda: wandb.init(project="p", id="x", resume="allow")`. A logger has
                `add_scalar(name, value, step)`, `log_metrics(values, step)` or `log(values, step=...)`. A
                logger object is accepted too, but then every rank and every standby makes one.

        Raises:
            UsageError: the logger is none of these, or not installed.
        """
        if not self._runtime.settings.evidence:  # a proof's attempt logs nothing
            self._parts.scalars.log_to(logger)

    def checkpoint(self, directory: str | Path, *, every: int, keep: int = 2, resume: bool = True) -> None:
        """Write a checkpoint after every `every` steps, and at the end; start from the newest one if there is any.

        Call it before the loop. A job that ended (every replica lost, the cluster gone, Ctrl-C) and is started again
        resumes from its newest checkpoint, with the bits of a run that never ended. If neither replicas nor buddies
        have all of the state, the ranks of a running job return to the newest checkpoint. While a replica of every part
        lives, recoveries never read one. Rank 0, or the first holder of each part of a divided state, copies the state
        between two steps, and a thread writes the copy, in the format of torch.distributed.checkpoint. A checkpoint
        appears in the directory when all of it is on the disk. An error while writing is reported and does not fail
        the training. Where the state is divided, a job of another layout can start from the checkpoint.

        Args:
            directory: a directory on a file system that all hosts share.
            every: number of steps from one checkpoint to the next.
            keep: number of complete checkpoints to keep; older ones are removed.
            resume: False to start anew; the directory must then hold no checkpoint.

        Raises:
            UsageError: every or keep < 1.
        """
        self._parts.checkpointing.ask(directory, every, keep, resume)

    def buddy(self, *, every: int) -> None:
        """Keep snapshots of a divided state in the host memory of other ranks, for when a part has no holder left.

        Call it before the loop, on every rank. After every `every` steps each rank copies its part of the state into
        host memory, and another rank, its buddy, on another host if there is one, fetches that copy in the background.
        If all holders of a part are lost, all ranks return to the newest version of which there is a snapshot of
        every part: at most `every` steps, and those during which that version was on its way, are computed again. While
        each part has a holder, recoveries never use one.

        Memory, on each rank's host: four times the rank's part of the state (two snapshots of its own, two that it
        keeps for its ward). Where every rank holds all of the state (plain DDP) a buddy would hold nothing that others
        do not, and nothing is copied. `relight run --buddy-every K` does the same for a script that does not call this.

        Args:
            every: number of steps from one snapshot to the next.

        Raises:
            UsageError: every < 1.
        """
        self._parts.snapshots.ask(every)

    def carry(self, *things: Any, ignore: Sequence[str] = ()) -> None:
        """Declare state that the script itself carries from step to step, where relight does not find it.

        relight finds such names by itself, and keeps them: variables that a step reads before it writes them, and that
        an earlier step wrote. Call this before the loop, on every rank.

        Args:
            things: names, as the function that holds the loop sees them (`"hidden"`, `"self.baseline"`), or objects
                whose contents change: lists, dicts, deques, tensors, random generators, objects of your own
                classes.
            ignore: names that need not be carried, since no step depends on them.

        Raises:
            UsageError: an object of a kind that cannot be carried.
        """
        self._parts.carried.declare(*things, ignore=ignore)

    def steps(self, until: int) -> Iterator[Step]:
        """Offer steps until `until` of them are committed, in total, on every rank.

        Code above `with step` in the loop's body belongs to the step, and runs again with it. Code after the block may
        evaluate, log and save, but must not change the objects passed to `Training`. Guard it with `step.committed`,
        since it also runs after a step that a failure interrupted.

        Args:
            until: number of steps of the whole job.
        """
        if until < 1:
            raise UsageError(f"steps(until={until}): at least one step")
        if self._runtime.has_begun:
            raise UsageError(_CALLED_AGAIN.format("was called a second time in this process"))
        if place := loops_around(sys._getframe(1), self._built_at):
            raise UsageError(_CALLED_AGAIN.format(f"stands inside another loop ({place})"))
        self._runtime.has_begun = True
        return self._loop.run(until)


def _refuse_what_standbys_cannot_build(runtime: Runtime, *, staged: bool) -> None:
    """Raises UsageError if a standby, which does not know its rank, would build other things than that rank."""
    if staged:
        runtime.runs_other_modules()
        if not runtime.builds_late:
            raise UsageError(
                "ranks build different stages of a pipeline, so a standby must know which rank it takes before it "
                "builds anything: relight.init(late_standby=True)"
            )
    elif runtime.builds_late and runtime.guessed and runtime.rank == 0 and not runtime.is_standby:
        runtime.say(
            "late standby",
            "the script imports torch.distributed.pipelining and hands over no pipeline: standbys build when they "
            "know their rank, for nothing, and recoveries take that much longer. Say "
            "relight.init(late_standby=False), or True if ranks build different things",
        )
    # A standby that knows its rank makes whichever groups that one makes.
    if not runtime.builds_late and (obstacle := runtime.table.obstacle()):
        raise UsageError(obstacle)
