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

import math
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from relight.core.commands import Assign, Begin, Restore, Resume
from relight.core.events import Restored, RestoreProgress, StandbyReady, StepResumed, TrainingDone, TrainingEntered
from relight.core.fault import Point
from relight.core.position import Phase
from relight.errors import RestoreError, StepInterrupted, UsageError
from relight.training import rng
from relight.training.data import batch_digest, make_source
from relight.training.job import current_runtime
from relight.training.runtime import Standing, Superseded
from relight.training.state import TrackedState
from relight.training.torch_private import BucketLayout, reset_scaler
from relight.training.writes import WriteWatch
from relight.transfer.codec import decode_tree, encode_tree, unflatten
from relight.transfer.restore import Offer

# Buffers are compared with their value at the start of the step in these steps, and every so often after.
_FULL_BUFFER_STEPS = 3
_BUFFER_CHECK_EVERY = 256
# How many parameters look, when their gradient is ready, whether the generation was closed: a backward pass stops
# within a fraction of its length, at a cost of microseconds.
_BACKWARD_GATES = 24


class Step:
    """One step on offer. Use it once, as `with step as batch`."""

    def __init__(self, training: "Training", number: int, attempt: int, *, warmup: bool = False) -> None:
        self._training = training
        self.number = number
        self.attempt = attempt  # how often this step was started before
        self.warmup = warmup  # a standby's rehearsal; nothing of it is kept
        self.committed = False  # whether the block ran to its end and its write counts
        self.entered = False

    @property
    def epoch(self) -> int:
        """The epoch that this step's batch lies in."""
        return self._training._epoch(self.number)

    def report(self, loss: torch.Tensor | float) -> None:
        """Show `loss` in the progress line. Reads the tensor only if it costs no wait (host memory)."""
        self._training._report_loss(loss)

    def __enter__(self) -> Any:
        self.entered = True
        return self._training._enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._training._exit(self, error)


class Training:
    """Everything of a training run that must survive.

    Args:
        model: the module (usually wrapped in DDP), or several as a dict.
        optimizer: the optimizer of its parameters, or several as a dict.
        data: a DataLoader, an object with `state_dict` (StatefulDataLoader), a sequence of batches, or a function
            from the batch's number to the batch. None: the block fetches its own data from `step.number`.
        scheduler, scaler, ema: the usual companions; each optional.
        accumulate: batches per step. With more than one, `with step as batches` yields a list.
        seed: of the random streams; every step starts with streams derived from (seed, step, rank).
        rng: "step" for that, or "preserve" to let the script's own streams run on from step to step.
        per_rank: objects with `state_dict` whose state differs between ranks.
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
        seed: int = 0,
        rng: str = "step",
        per_rank: dict[str, Any] | None = None,
        **stateful: Any,
    ) -> None:
        if rng not in ("step", "preserve"):
            raise UsageError(f'rng={rng!r}: choose "step" or "preserve"')
        if accumulate < 1:
            raise UsageError(f"accumulate={accumulate}: at least one batch per step")
        self._runtime = current_runtime()
        self._accumulate = accumulate
        self._seed = seed
        self._preserve_rng = rng == "preserve"
        modules = dict(model) if isinstance(model, dict) else {"model": model}
        optimizers = dict(optimizer) if isinstance(optimizer, dict) else {"optimizer": optimizer}
        objects = {
            name: thing for name, thing in {"scheduler": scheduler, "scaler": scaler}.items() if thing is not None
        }
        objects.update(stateful)
        if isinstance(ema, nn.Module):
            modules["ema"] = ema
        elif ema is not None:
            objects["ema"] = ema
        self._state = TrackedState(modules, optimizers, objects, per_rank or {})
        self._check_optimizers()
        self._source = make_source(data, seed)
        self._layouts = [BucketLayout(m) for m in modules.values() if isinstance(m, DistributedDataParallel)]
        self.version = 0  # optimizer steps applied
        self._lineage = xxhash.xxh3_64_hexdigest(f"{seed}/{self._runtime.world_size}/{self._state.layout()}".encode())
        self._attempt = 0
        self._until = 0
        self._batch: Any = None
        self._inherited_mark = (-1, 0)
        self._batch_of = -1  # the step whose batch is in hand
        self._wrote = False  # the barrier of the step under way was passed
        self._prepared = False
        self._warming = False
        self._restore: Restore | None = None  # decided, not carried out yet
        self._gradients_to_none = True
        self._fingerprint: tuple[Any, ...] | None = None
        self._streams: Any = None  # with rng="preserve": the streams at the last barrier, and after the last batch
        self._batch_streams: tuple[int, Any] | None = None
        self._resumed_ns = 0
        self._finish_started_ns = 0
        self._forward_ns = 0
        self._first_after_recovery = False
        self._fence = torch.zeros(2, dtype=torch.int64)
        self._watch = WriteWatch(self._is_tracked, self._before_write, lambda: self._runtime.in_step)
        self._hooks: list[Any] = []

    # --- what the script calls --------------------------------------------------------------------------------
    def steps(self, until: int) -> Iterator[Step]:
        """Offer steps until `until` of them are committed, in total, on every rank.

        The body of the loop outside `with step` may evaluate, log and save, but must not change what was handed
        over; guard it with `step.committed`, since it also runs after a step that a failure interrupted.
        """
        if until < 1:
            raise UsageError(f"steps(until={until}): at least one step")
        self._until = until
        self._install()
        try:
            if self._runtime.is_standby:
                yield from self._warm_up()
            else:
                self._enter_training()
            while True:
                yield from self._offer()
                if self._finish():
                    return
        except GeneratorExit:
            # Either `break` (early stopping; every rank must do so after the same step), or an exception on its way
            # out of the loop. Which one shows when the script ends: `bootstrap` then calls `leave_early`, or reports.
            self._until = self.version
            self._runtime.at_end = self._leave_early
            raise
        finally:
            self._uninstall()

    def _leave_early(self) -> None:
        while not self._finish():
            pass

    # --- the loop ---------------------------------------------------------------------------------------------
    def _offer(self) -> Iterator[Step]:
        runtime = self._runtime
        while self.version < self._until:
            if runtime.closed:
                self._recover()
                continue
            self._check_untouched_between_steps()
            self._set_position(Point.BETWEEN_STEPS)
            step = Step(self, self.version, self._attempt)
            yield step
            if not step.entered:
                raise UsageError("the loop took a step but did not enter it: write `with step as batch:` in its body")

    def _set_position(self, point: Point | None = None) -> None:
        runtime = self._runtime
        page = runtime.page
        page.put("step", self.version)
        page.put("version", self.version)
        page.put("attempt", self._attempt)
        runtime.faults.step, runtime.faults.attempt = self.version, self._attempt
        if page.phase is not Phase.OUTSIDE:
            page.stamp(Phase.OUTSIDE)
        if point is not None:
            runtime.faults.strike(point)

    def _enter(self, step: Step) -> Any:
        runtime = self._runtime
        page = runtime.page
        self._wrote = self._prepared = False
        page.put("prepared", -1)
        runtime.in_step = True
        page.stamp(Phase.FORWARD)
        self._forward_ns = time.monotonic_ns()
        first = next(iter(self._state.parameters), None)
        self._gradients_to_none = first is None or first.grad is None
        if self._warming:
            self._source.position(0, runtime.rank)
        every = self.version < _FULL_BUFFER_STEPS or self.version % _BUFFER_CHECK_EVERY == 0
        self._state.remember_step_start(every_buffer=every)
        if not self._preserve_rng:
            rng.seed_everything(self._seed, "step", self.version, runtime.rank)
        elif self._streams is not None:
            # Streams run on from barrier to barrier: what is drawn outside is drawn by no replacement, so it must
            # not count.
            rng.put_back(self._streams)
        if self._batch_of != step.number or self._warming:
            batches = [self._source.next() for _ in range(self._accumulate)]
            self._batch = batches[0] if self._accumulate == 1 else batches
            self._batch_of = step.number
            self._check_batch(step)
        if not self._preserve_rng:
            # Drawing the batch may have used the streams; a redo keeps its batch and draws nothing.
            rng.seed_everything(self._seed, "forward", self.version, runtime.rank)
        elif self._batch_streams is None or self._batch_streams[0] != step.number:
            self._batch_streams = (step.number, rng.capture())
        else:
            rng.put_back(self._batch_streams[1])
        return self._batch

    def _check_batch(self, step: Step) -> None:
        """A replacement must draw the very batch that its predecessor drew."""
        page = self._runtime.page
        digest = batch_digest(self._batch)
        if self._inherited_mark[0] == step.number and self._inherited_mark[1] != digest and not self._warming:
            raise UsageError(
                f"the replacement of rank {self._runtime.rank} drew another batch for step {step.number} than the process "
                "it replaced: the data depends on something that was fixed before the rank was known. Build samplers "
                "with job.rank (torch's DistributedSampler is corrected by itself), or hand over a function: "
                "relight.Training(data=lambda number: ...)"
            )
        if not self._warming:
            page.mark_batch(step.number, digest)

    def _exit(self, step: Step, error: BaseException | None) -> bool:
        runtime = self._runtime
        try:
            if error is None:
                self._complete(step)
                return False
            if not isinstance(error, Exception) or not self._is_interruption(error):
                return False
            if self._warming:
                raise error
        except StepInterrupted as interruption:
            error = interruption
        finally:
            runtime.in_step = False
        error.__traceback__ = None  # its frames hold the broken group and the aborted step's activations
        self._recover()
        return True

    def _complete(self, step: Step) -> None:
        """The block ran to its end: commit."""
        runtime = self._runtime
        page = runtime.page
        if not self._wrote:
            self._before_write()
            self._refuse_pending_gradients()
        runtime.faults.strike(Point.AFTER_WRITE)
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)
        if self._warming:
            return
        self._lineage = xxhash.xxh3_64_hexdigest(f"{self._lineage}/{self.version}/{runtime.world_size}".encode())
        self.version += 1
        page.put("version", self.version)
        page.put("torn", 0)
        step.committed = True
        runtime.in_step = False
        self._batch = None
        self._prepared = False
        self._fingerprint = self._state.fingerprint()
        page.stamp(Phase.OUTSIDE)
        if self._first_after_recovery:
            self._report_first_commit(step)
        runtime.faults.strike(Point.AFTER_STEP)
        self._attempt = 0
        if self._restore is not None or runtime.closed:  # a recovery decided to finish this step, or waits for it
            self._recover()

    def _report_first_commit(self, step: Step) -> None:
        self._first_after_recovery = False
        self._runtime.link.send(
            StepResumed(
                process=self._runtime.process,
                rank=self._runtime.rank,
                generation=self._runtime.generation,
                step=step.number,
                resumed_ns=self._resumed_ns,
                forward_ns=self._forward_ns,
                commit_ns=time.monotonic_ns(),
            )
        )

    def _is_interruption(self, error: Exception) -> bool:
        """Whether this exception comes from a failure elsewhere rather than from the script."""
        if isinstance(error, UsageError):
            return False
        if isinstance(error, StepInterrupted):
            return True
        if not isinstance(error, (RuntimeError, OSError)):
            return False
        runtime = self._runtime
        if runtime.closed:
            return True
        broken = isinstance(error, dist.DistBackendError) or runtime.is_broken()
        return broken and runtime.await_stop(_first_line(error))

    # --- the barrier ------------------------------------------------------------------------------------------
    def _before_write(self) -> None:
        """The barrier, in front of the first write of a step. Returns when the write may begin."""
        if self._wrote:
            return
        runtime = self._runtime
        page = runtime.page
        if self._warming:
            self._wrote = True
            return
        if runtime.device.type == "cuda":
            # A host that has only launched the collectives is not prepared (docs/PROTOCOL.md, C1 to C3).
            torch.cuda.synchronize(runtime.device)
        if runtime.closed:
            raise StepInterrupted("the generation was closed before this rank was prepared")
        if self.version < _FULL_BUFFER_STEPS or self.version % _BUFFER_CHECK_EVERY == 0:
            self._state.notice_changed_buffers()
        self._keep_private(self.version + 1)
        self._prepared = True
        page.put("prepared", self.version)
        runtime.faults.strike(Point.BEFORE_BARRIER)
        page.stamp(Phase.BARRIER)
        if not self._pass_fence():
            self._await_decision_when_prepared()
        self._wrote = True
        page.put("torn", 1)
        page.stamp(Phase.OPTIMIZER)
        runtime.faults.strike(Point.OPTIMIZER)

    def _pass_fence(self) -> bool:
        """One small all-reduce: it completes only once every rank has entered it, prepared. False if it broke."""
        runtime = self._runtime
        fence = self._fence
        fence[0], fence[1] = 1, self.version
        try:
            inner = runtime.groups[0].inner
            if runtime.closed or inner is None:
                return False
            page = runtime.page
            page.count_collective()
            work = inner.group.allreduce([fence])
            runtime.faults.strike(Point.BARRIER)
            work.wait()
        except RuntimeError as error:
            if not runtime.closed:
                runtime.report_broken_collective(_first_line(error))
            return False
        ranks, steps = int(fence[0]), int(fence[1])
        if (ranks, steps) != (runtime.world_size, runtime.world_size * self.version):
            raise UsageError(
                f"rank {runtime.rank} is at step {self.version}, but the ranks' step numbers add up to {steps} instead of "
                f"{runtime.world_size * self.version}: some rank runs another number of steps or collectives"
            )
        return True

    def _await_decision_when_prepared(self) -> None:
        """The barrier broke. Whether the step is finished is for the controller to decide: others may have passed."""
        standing = self._standing(prepared=self.version)
        restore = self._runtime.report_standing(standing)
        self._restore = restore
        if restore.target == self.version + 1:
            self._finish_started_ns = time.monotonic_ns()
            self._runtime.faults.strike(Point.FINISH)
            return
        self._prepared = False
        raise StepInterrupted("the decision was to repeat this step")

    def _standing(self, *, prepared: int = -1, blank: bool = False) -> Standing:
        return Standing(step=self.version, version=self.version, lineage=self._lineage, prepared=prepared, blank=blank)

    # --- a recovery -------------------------------------------------------------------------------------------
    def _recover(self, *, blank: bool = False) -> None:
        """Stand still, reach the decided version, resume. Again from the top if the generation is superseded."""
        runtime = self._runtime
        runtime.in_step = False
        while True:
            restore = self._restore
            self._restore = None
            if restore is None or not runtime.is_current(restore.generation):
                restore = runtime.report_standing(self._standing(blank=blank))
            runtime.page.stamp(Phase.PARKED)
            try:
                was_target = runtime.rank in restore.targets
                self._obey(restore)
                blank = False
                runtime.await_order(Resume, restore.generation)
                runtime.faults.strike(Point.RESUME)
                self._resume(restore, was_target)
                return
            except Superseded:
                continue
            except RestoreError as error:
                runtime.report_restore_failure(restore.generation, error)
                runtime.await_newer(restore.generation)

    def _obey(self, restore: Restore) -> None:
        """Carry out Restore: clean, reset, reform, copy or serve, roll back; then report."""
        runtime = self._runtime
        finish = self._seconds_since(self._finish_started_ns) if self._finish_started_ns else 0.0
        self._finish_started_ns = 0
        forming = runtime.begin_forming(restore.generation)
        for group in runtime.groups:
            group.detach()
        started = time.monotonic_ns()
        redo = self.version == restore.target
        copied, copy_seconds = 0, 0.0
        known: dict[int, list[int]] = {}
        if runtime.rank in restore.targets:
            copied, known = self._copy(restore)
            copy_seconds = self._seconds_since(started)
        elif self.version != restore.target:
            raise RestoreError(f"rank {runtime.rank} is at version {self.version}, the target is {restore.target}")
        elif redo:
            self._state.roll_back()
            self._reset_scalers()
            self._state.clear_gradients(to_none=self._gradients_to_none)
        runtime.faults.strike(Point.ROLLBACK)
        rollback_started = time.monotonic_ns()
        for layout in self._layouts:
            layout.reset(restore.target)
        rollback_seconds = self._seconds_since(rollback_started)
        offer = None
        if restore.targets and runtime.rank not in restore.targets:
            meta = {
                "lineage": self._lineage,
                "private_buffers": sorted(self._state.private_buffers),
                "gradients_to_none": self._gradients_to_none,
                "until": self._until,
            }
            offer = Offer(restore.generation, restore.target, meta, self._state.replicated())
            runtime.server.offer(offer)
        digest_started = time.monotonic_ns()
        digest = self._state.digest(known)
        digest_seconds = self._seconds_since(digest_started)
        reform_started = time.monotonic_ns()
        self._inner = runtime.await_formed(forming, restore.generation)
        self._attempt = restore.attempt
        runtime.link.send(
            Restored(
                process=runtime.process,
                rank=runtime.rank,
                generation=restore.generation,
                version=self.version,
                lineage=self._lineage,
                state_digest=digest,
                layout_digest=self._state.layout(),
                data_digest="",
                progress=RestoreProgress(
                    finish_seconds=finish,
                    reform_seconds=self._seconds_since(reform_started),
                    copy_seconds=copy_seconds,
                    copied_bytes=copied,
                    digest_seconds=digest_seconds,
                    rollback_seconds=rollback_seconds,
                ),
            ),
            report=True,
        )

    def _copy(self, restore: Restore) -> tuple[int, dict[int, list[int]]]:
        """Fetch the target version from the sources, and the rank-private state from beside the page."""
        runtime = self._runtime
        runtime.page.put("torn", 1)
        own = self._state.destination()
        client = runtime.fetcher(restore.generation)
        first = runtime.rank % len(restore.sources)
        addresses = [restore.sources[first].address]
        fetched = client.fetch(restore.generation, restore.target, addresses, own.get)
        tree = unflatten(fetched.header.tree, fetched.tensors)
        self._state.adopt(fetched, tree)
        payload = runtime.page.read_private(restore.target)
        if payload is None:
            raise RestoreError(f"rank {runtime.rank} has no private state of version {restore.target}")
        private = decode_tree(payload)
        self._state.adopt_private(private)
        self._inherited_mark = runtime.page.inherited_batch()
        self._source.position(restore.target * self._accumulate, runtime.rank)
        if private["data"] is not None:
            self._source.restore(private["data"])
        if private["rng"] is not None:
            self._streams = private["rng"]
        self._batch, self._batch_of = None, -1
        self.version = restore.target
        self._lineage = fetched.header.meta["lineage"]
        self._until = fetched.header.meta["until"]
        self._reset_scalers()
        self._state.clear_gradients(to_none=fetched.header.meta["gradients_to_none"])
        self._fingerprint = self._state.fingerprint()
        runtime.page.put("torn", 0)
        runtime.page.put("version", self.version)
        known = dict(enumerate(fetched.digests)) if self._received_in_place(fetched.tensors) else {}
        return fetched.received_bytes, known

    def _reset_scalers(self) -> None:
        for thing in self._state.objects.values():
            if isinstance(thing, torch.amp.GradScaler):
                reset_scaler(thing)

    def _received_in_place(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the received tensors are this rank's own, so that their digests need not be computed again."""
        live = self._state.replicated().tensors
        return len(live) == len(tensors) and all(
            a.data_ptr() == b.data_ptr() for a, b in zip(live, tensors, strict=True)
        )

    def _resume(self, restore: Restore, was_target: bool) -> None:
        runtime = self._runtime
        runtime.open_generation(restore.generation, self._inner)
        if was_target:
            runtime.is_standby = False
        self._resumed_ns = time.monotonic_ns()
        self._first_after_recovery = True
        self._fingerprint = self._state.fingerprint()
        runtime.page.put("prepared", -1)
        self._set_position()

    # --- entering and leaving ---------------------------------------------------------------------------------
    def _enter_training(self) -> None:
        runtime = self._runtime
        self._source.position(0, runtime.rank)
        self._keep_private(0)
        runtime.started = True
        runtime.link.send(
            TrainingEntered(
                process=runtime.process,
                rank=runtime.rank,
                version=0,
                layout_digest=self._state.layout(),
                state_digest=self._state.digest(),
                until=self._until,
            ),
            report=True,
        )
        runtime.await_order(Begin)
        self._set_position()

    def _warm_up(self) -> Iterator[Step]:
        """A standby: rehearse one step alone, then wait for a rank, then be restored."""
        runtime = self._runtime
        runtime.started = True
        runtime.faults.strike(Point.WARMUP)
        self._warming = True
        step = Step(self, 0, 0, warmup=True)
        yield step
        if not step.entered:
            raise UsageError("the loop took a step but did not enter it: write `with step as batch:` in its body")
        self._warming = False
        self._source.position(0, runtime.rank)
        self._batch_of = -1
        runtime.page.stamp(Phase.STANDBY)
        runtime.link.send(StandbyReady(process=runtime.process, layout_digest=self._state.layout()), report=True)
        runtime.faults.strike(Point.IDLE)
        order = runtime.await_order(Assign)
        runtime.take_assignment(order.generation, order.rank)
        runtime.faults.recovery = order.generation - 1
        runtime.faults.strike(Point.PROMOTED)
        runtime.closed = True
        self._recover(blank=True)

    def _finish(self) -> bool:
        """All steps are committed here: True once that holds everywhere, False if a recovery sent this rank back."""
        runtime = self._runtime
        if runtime.closed:
            self._recover()
            if self.version < self._until:
                return False
        runtime.page.stamp(Phase.DONE)
        runtime.link.send(
            TrainingDone(
                process=runtime.process,
                rank=runtime.rank,
                generation=runtime.generation,
                version=self.version,
                lineage=self._lineage,
                state_digest=self._state.digest(),
                cut_collectives=runtime.cut_collectives,
            ),
            report=True,
        )
        if runtime.await_release():
            runtime.started = False
            return True
        self._recover()
        return False

    # --- the parts --------------------------------------------------------------------------------------------
    def _keep_private(self, version: int) -> None:
        tree = self._state.private()
        tree["data"] = self._source.state()
        self._streams = rng.capture() if self._preserve_rng else None
        tree["rng"] = self._streams
        self._runtime.page.write_private(version, encode_tree(tree, "rank-private state"))

    def _install(self) -> None:
        self._watch.install()
        for thing in self._state.objects.values():
            if isinstance(thing, LRScheduler):
                self._watch.wrap_scheduler(thing)
        for module in self._state.modules.values():
            if any(p.requires_grad for p in module.parameters()):
                self._hooks.append(module.register_forward_pre_hook(self._on_forward))
                self._hooks.append(module.register_forward_hook(self._on_forward_end))
        gated = [p for p in self._state.parameters if p.requires_grad]
        chosen = gated[:: max(1, len(gated) // _BACKWARD_GATES)]
        for index, parameter in enumerate(chosen):
            hook = self._gate_with_fault if index == len(chosen) // 2 else self._gate
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _uninstall(self) -> None:
        self._watch.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_forward(self, module: nn.Module, arguments: Any) -> None:  # noqa: ARG002
        runtime = self._runtime
        if not runtime.in_step or self._wrote or self._warming:
            return
        if runtime.page.phase is not Phase.FORWARD:
            runtime.page.stamp(Phase.FORWARD)
        runtime.faults.strike(Point.FORWARD)

    def _on_forward_end(self, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002
        if not self._runtime.in_step or self._wrote or self._warming:
            return
        tensor = _first_differentiable(output)
        if tensor is not None:
            tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: torch.Tensor) -> None:  # noqa: ARG002
        runtime = self._runtime
        if runtime.in_step and not self._wrote and runtime.page.phase is Phase.FORWARD:
            runtime.page.stamp(Phase.BACKWARD)

    def _gate(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        runtime = self._runtime
        if runtime.closed and runtime.in_step and not self._warming:
            raise StepInterrupted("the generation was closed by a failure elsewhere")

    def _gate_with_fault(self, parameter: torch.Tensor) -> None:
        self._gate(parameter)
        if self._runtime.in_step and not self._warming:
            self._runtime.faults.strike(Point.BACKWARD)

    def _report_loss(self, loss: torch.Tensor | float) -> None:
        if isinstance(loss, torch.Tensor):
            if loss.device.type != "cpu":
                return
            loss = float(loss.detach())
        self._runtime.page.report_loss(loss)
        if math.isnan(loss):
            self._runtime.say(
                "nan",
                f"rank {self._runtime.rank}: the loss of step {self.version} is NaN; training goes on, since the same "
                "bits would give NaN again",
            )

    def _epoch(self, step: int) -> int:
        return self._source.epoch(step * self._accumulate)

    def _is_tracked(self, thing: Any) -> bool:
        known = [*self._state.modules.values(), *self._state.optimizers.values(), *self._state.objects.values()]
        return any(thing is other for other in known)

    def _check_optimizers(self) -> None:
        owned = {id(p) for p in self._state.parameters}
        for name, optimizer in self._state.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                if any(id(p) not in owned for p in group["params"]):
                    raise UsageError(
                        f"parameter group {index} of {name} holds parameters of a module that was not handed over: "
                        "relight.Training(model={...}) must name every module that trains"
                    )
            wrapped = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
            if wrapped and not any(isinstance(thing, LRScheduler) for thing in self._state.objects.values()):
                raise UsageError(
                    f"a learning-rate scheduler is attached to {name} but was not handed over: "
                    "relight.Training(..., scheduler=...)"
                )

    def _refuse_pending_gradients(self) -> None:
        if any(p.grad is not None and bool(p.grad.count_nonzero()) for p in self._state.parameters):
            self._runtime.say(
                "accumulate",
                "a step ended with gradients but without optimizer.step(): gradients carried from step to step are lost "
                "with a failure. Put the whole accumulation into one step: relight.Training(..., accumulate=K)",
            )

    def _check_untouched_between_steps(self) -> None:
        if self._fingerprint is None:
            return
        names = ("parameters", "learning rate", "scheduler")
        for name, before, now in zip(names, self._fingerprint, self._state.fingerprint(), strict=True):
            if before != now:
                raise UsageError(
                    f"{name} changed between step {self.version - 1} and step {self.version}, outside `with step`: move "
                    "that code into the block, after optimizer.step(), or a replacement would not have the change"
                )

    @staticmethod
    def _seconds_since(start_ns: int) -> float:
        return (time.monotonic_ns() - start_ns) / 1e9


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _first_differentiable(output: Any) -> torch.Tensor | None:
    """The first tensor in a module's output that carries gradients."""
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf
    if hasattr(output, "__dict__"):
        return _first_differentiable(dict(vars(output))) if vars(output) else None
    return None
