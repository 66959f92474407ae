"""`relight.Training`: the objects of a training run that must survive, and what is done with them beside its steps.

Forward and backward leave parameters alone; the first write waits at the barrier; the end of the block commits. A
failure before the barrier surfaces as an exception inside the block, which the block absorbs; then the same step is
offered again. See docs/PROTOCOL.md.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from relight.errors import UsageError
from relight.script_files import adopt_caller
from relight.training.carried.code.source import lines_of
from relight.training.job import current_runtime
from relight.training.loops import Loops
from relight.training.process.runtime import Runtime
from relight.training.state.tracked import TrackedState
from relight.training.state.values.kinds import OfProcess
from relight.training.worker.inventory import take_inventory
from relight.training.wrappers import each_by_name, unwrapped_objects, unwrapped_optimizers


class Training(Loops, OfProcess):
    """Keeps the state of a training run, and undoes and repeats steps that a failure interrupts.

    Create it once in each process, after the model is wrapped and before the loop. Everything that steps change must be
    handed over, or be found by relight itself (see `carry`).

    Args:
        model: the module (usually wrapped in `DistributedDataParallel` or by `fully_shard`), or several in a dict or
            list.
        optimizer: the optimizer of its parameters, or a dict or list of several. Default: None, for a script that
            writes its parameters by hand.
        data: a DataLoader; several in a dict, tuple or list; any object whose `__iter__` starts anew each time; an
            object with `state_dict` (StatefulDataLoader); a sequence of batches; or a function from the batch's number
            (int, counted from 0 on this rank) to the batch. Default: None; the block then gets its own data from
            `step.number`.
        scheduler: the learning-rate scheduler, or a dict or list of several. Default: None.
        scaler: the `torch.amp.GradScaler` of mixed precision, or several. Default: None.
        ema: averaged weights: an `AveragedModel`, or any object with `state_dict`, or several. Default: None.
        accumulate: batches per step. With more than 1, `with step as batches` yields a list. Default: 1.
        short_groups: an epoch's last step gets the batches that are left, a shorter list, instead of some of the next
            epoch's. The data needs a length. Default: False.
        seed: seed of the random streams; with `rng="step"` each step starts with streams derived from (seed, step,
            rank). Default: None, the seed of `relight run --seed`.
        rng: "step", or "preserve" to let the script's own streams run on from step to step. Default: "step".
        per_rank: dict of objects with `state_dict` whose state differs between ranks. Default: None.
        pipeline: the schedule of `torch.distributed.pipelining` that a step runs, or a list of schedules; `model` is
            then the module of this rank's stage, or a dict of the modules of its stages. Default: None.
        stateful: further modules, optimizers, schedulers and other objects with `state_dict` that hold equal state on
            all ranks, each under a keyword of its own, or several in a dict or list.

    Raises:
        UsageError: an object cannot be tracked, or `relight.init` was not called. The message names the object and
            what to do.

    Example::

        training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
        for step in training.steps(until=10_000):
            with step as batch:
                loss = model(batch).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step.committed and step.number % 500 == 0:
                evaluate(model)
    """

    def __init__(
        self,
        *,
        model: nn.Module | dict[str, nn.Module] | Sequence[nn.Module],
        optimizer: Optimizer | dict[str, Optimizer] | Sequence[Optimizer] | None = None,
        data: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        accumulate: int = 1,
        short_groups: bool = False,
        seed: int | None = None,
        rng: str = "step",
        per_rank: dict[str, Any] | None = None,
        pipeline: Any = None,
        **stateful: Any,
    ) -> None:
        runtime = self._runtime = current_runtime()
        adopt_caller(frame := sys._getframe(1))
        state = TrackedState(
            modules=dict(model) if isinstance(model, dict) else each_by_name({"model": model}),
            optimizers=unwrapped_optimizers(
                optimizer if isinstance(optimizer, dict) else each_by_name({"optimizer": optimizer})
            ),
            objects=unwrapped_objects(each_by_name({"scheduler": scheduler, "scaler": scaler, "ema": ema, **stateful})),
            per_rank=per_rank or {},
            pipeline=pipeline,
        )
        _refuse_what_standbys_cannot_build(runtime, staged=bool(state.division.stages()))
        seed = runtime.settings.seed if seed is None else seed
        self._parts = take_inventory(
            runtime, state, data=data, accumulate=accumulate, short_groups=short_groups, seed=seed, rng=rng
        )
        super().__init__(self._parts, lines_of(frame))

    @property
    def version(self) -> int:
        """Number of optimizer steps that the state has taken, in all processes of the job."""
        return self._parts.runtime.worker.version

    def publish(
        self,
        *,
        every: int | None = None,
        model: str | None = None,
        rename: Callable[[str, str], str] | None = None,
        stall_timeout_seconds: float = 5.0,
    ) -> None:
        """Send the model's weights to every `relight.Receiver` of this run.

        With `every`, an update is sent at the start, after every so many steps and at the end; call it before the loop.
        Without, one update is sent at the next boundary between two steps. Buckets travel while the next step computes;
        the write of that step waits until the last bucket is read, for at most `stall_timeout_seconds`: then the update
        is given up. Engines answer with a version only once every rank is known to hold it. An engine that is silent
        for so long is dropped; publishing never fails the training.

        Call it on every rank. Where weights are divided over ranks (FSDP2, tensor parallelism, pipelines), each rank
        writes the parts that it holds, and engines get whole tensors, those of all stages.

        Args:
            every: steps from one update to the next. Default: None, one update now.
            model: name of the model, if `Training` was given a dict. Default: None, the only model; in a pipeline, the
                modules that stages run.
            rename: function `rename(model, name)` that returns the name of a tensor in the engines. Needed if stages
                have tensors of the same name. Default: None, the tensor's own name.
            stall_timeout_seconds: how long a write waits for engines. Default: 5.

        Raises:
            UsageError: there is no such model, `every` is less than 1, two tensors have one name, or a tensor cannot be
                moved.

        Example::

            training.publish(every=50)  # in the training script, before the loop

            receiver = relight.Receiver("runs/mine", model=model)  # in an engine
        """
        self._parts.publishing.ask(every, model, rename, stall_timeout_seconds)

    def log_to(self, logger: Any) -> None:
        """Log the values that `Step.report` is given, on rank 0: each committed step once, also if rank 0 is replaced.

        Call it before the loop, on every rank. Values are also written to `scalars.jsonl` in the run directory. Loggers
        work in a thread: a slow one delays no step, and one that fails is reported and left out.

        Args:
            logger: "tensorboard" (into the run directory); "wandb" (a run with the job's name, in the project that
                WANDB_PROJECT names); or a function that makes a logger, called on rank 0 alone. A logger has
                `add_scalar(name, value, step)`, `log_metrics(values, step)` or `log(values, step=...)`. An existing
                logger is accepted too, but then every rank and every standby makes one.

        Raises:
            UsageError: `logger` is none of these, or the package is not installed.

        Example::

            training.log_to("tensorboard")
            training.log_to(lambda: wandb.init(project="p", id="x", resume="allow"))
        """
        if not self._runtime.settings.is_trial:  # which has no curves
            self._parts.scalars.log_to(logger)

    def checkpoint(self, directory: str | Path, *, every: int, keep: int = 2, resume: bool = True) -> None:
        """Write a checkpoint after every so many steps and at the end, and start from the newest one there is.

        Call it before the loop, on every rank. A job that ended (every replica lost, the cluster gone, Ctrl-C) and is
        started again continues from its newest checkpoint, with the bits of a run that never ended. The ranks of a
        running job go back to it as well, if neither replicas nor buddies have all of the state. While each part of the
        state has a replica, no recovery reads a checkpoint.

        Rank 0, or the first holder of each part of a divided state, copies its part between two steps, and a thread
        writes the copy in the format of `torch.distributed.checkpoint`. A checkpoint appears in the directory when all
        of it is on the disk. Errors while writing are reported and do not fail the training. A job that divides the
        state in another way can start from it.

        Args:
            directory: a directory on a file system that all hosts share.
            every: steps from one checkpoint to the next.
            keep: number of complete checkpoints to keep; older ones are removed. Default: 2.
            resume: if False, the job starts anew, and the directory must hold no checkpoint. Default: True.

        Raises:
            UsageError: `every` or `keep` is less than 1.

        Example::

            training.checkpoint("checkpoints/", every=500)
        """
        self._parts.checkpointing.ask(directory, every, keep, resume)

    def buddy(self, *, every: int) -> None:
        """Keep snapshots of a divided state in the host memory of other ranks, for when a part has no holder left.

        Call it before the loop, on every rank. After every so many steps each rank copies its part of the state into
        host memory, and another rank, its buddy, on another host if there is one, fetches that copy in the background.
        If all holders of a part are lost, all ranks go back to the newest version of which every part has a snapshot:
        at most `every` steps, and those during which that version was on its way, are computed again. While each part
        has a holder, no recovery uses a snapshot.

        Memory on each rank's host: four times the rank's part of the state (two snapshots of its own, two that it keeps
        for another rank). Where every rank holds all of the state (plain DDP) no snapshots are made. `relight run
        --buddy-every K` does the same for a script that does not call this.

        Args:
            every: steps from one snapshot to the next.

        Raises:
            UsageError: `every` is less than 1.

        Example::

            training.buddy(every=20)
        """
        self._parts.snapshots.ask(every)

    def carry(self, *things: Any, ignore: Sequence[str] = ()) -> None:
        """Declare state that the script itself carries from step to step, where relight does not find it.

        relight finds such names by itself, and keeps them: variables that a step reads before it writes them, and that
        an earlier step wrote. Call this before the loop, on every rank.

        Args:
            things: names, as the function that holds the loop sees them (`"hidden"`, `"self.baseline"`), or objects
                whose contents change: lists, dicts, deques, tensors, random generators, objects of a class of the
                script's.
            ignore: names that are not to be carried, since no step depends on them.

        Raises:
            UsageError: an object of a kind that cannot be carried.

        Example::

            training.carry("hidden", replay_buffer, ignore=["progress_bar"])
        """
        self._parts.carried.declare(*things, ignore=ignore)


def _refuse_what_standbys_cannot_build(runtime: Runtime, *, staged: bool) -> None:
    """Raises UsageError if a standby, which does not know its rank, would build other things than that rank."""
    if staged:
        runtime.protection.runs_other_modules()
        if not runtime.builds_late:
            raise UsageError(
                "ranks build different stages of a pipeline, so a standby must know which rank it takes before it "
                "builds anything: relight.init(late_standby=True)"
            )
    elif runtime.builds_late and runtime.guessed and runtime.rank == 0 and not runtime.is_standby:
        runtime.notices.say(
            "late standby",
            "the script imports torch.distributed.pipelining and hands over no pipeline: standbys build when they "
            "know their rank, for nothing, and recoveries take that much longer. Say "
            "relight.init(late_standby=False), or True if ranks build different things",
        )
    # A standby that knows its rank makes whichever groups that one makes.
    if not runtime.builds_late and (obstacle := runtime.groups.table.obstacle()):
        raise UsageError(obstacle)
