"""A worker's part in a recovery, on its main thread: stand still, reach the decided version, resume.

The order is that of docs/PROTOCOL.md: Stop (done by the runtime), then Clean, Reset, Restore, Rollback, Resume.
"""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from relight.core.commands import FallbackTier, Restore, Resume, Save
from relight.core.events import Restored, RestoreProgress, Saved
from relight.core.fault import Point
from relight.core.position import Phase
from relight.errors import CheckpointError, RestoreError, StepInterrupted
from relight.training.checkpoint.checkpointing import Checkpointing
from relight.training.checkpoint.snapshots import Snapshots
from relight.training.collectives.generation_group import GenerationGroups
from relight.training.connection.page import NO_PRIVATE
from relight.training.data.batches import Batches
from relight.training.process.private import PrivateState
from relight.training.process.progress import Progress
from relight.training.process.runtime import Runtime, Superseded
from relight.training.publish.publishing import Publishing
from relight.training.state.assignment import Assignment
from relight.training.state.structure import structure_differs
from relight.training.state.torch_settings import adopt_settings
from relight.training.state.tracked import TrackedState
from relight.training.transaction.transaction import Transaction
from relight.transfer.io.codec import decode_tree, raw_bytes, unflatten
from relight.transfer.restore.fabric import Address, choose_sources
from relight.transfer.restore.offer import Offer

Digests = dict[int, int]  # by bucket
PRIVATE_SECONDS = 10.0  # for the private state to come from another host
_POLL_SECONDS = 0.001


@dataclass
class FallbackTiers:
    """Below replicas; and engines that were given versions which may be undone."""

    snapshots: Snapshots
    checkpointing: Checkpointing
    publishing: Publishing


class Recovery:
    """Everything that changes the state of this rank other than the script itself."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        progress: Progress,
        batches: Batches,
        assignment: Assignment,
        private: PrivateState,
        tiers: FallbackTiers,
        transaction: Transaction,
    ) -> None:
        self._tiers = tiers
        self._transaction = transaction
        self._snapshots = tiers.snapshots
        self._assignment = assignment
        self._private = private
        self._runtime = runtime
        self._state = state
        self._progress = progress
        self._batches = batches
        self._blank = False  # nothing to offer: a replacement before its copy is complete and verified
        self._layouts = state.track_layouts(progress)

    def begin_step(self) -> None:
        """Every attempt of a step begins with the same state of the communication, whatever came before."""
        self._layouts.begin_step()

    def before_barrier(self) -> None:
        """What ranks must have agreed on when they are prepared."""
        launches = self._runtime.launches
        self._layouts.settle()
        self._runtime.launches = launches  # the script has launched nothing

    def run(self, *, blank: bool = False) -> None:
        """Returns once this rank trains on. From the top whenever a newer generation supersedes the one obeyed."""
        runtime, progress = self._runtime, self._progress
        runtime.in_step = False
        self._blank = blank
        while True:
            restore, progress.restore = progress.restore, None
            if restore is None or not runtime.is_current(restore.generation):
                restore = runtime.report_status(progress.status(blank=self._blank))
            runtime.page.stamp(Phase.PARKED)
            if isinstance(restore, Save):
                self._save(restore)
                runtime.await_newer(restore.generation)
                continue
            try:
                groups = self._obey(restore)
                resume: Resume = runtime.await_order(Resume, generation=restore.generation)
                runtime.page.put("fault_ns", 0)  # one that this process survived is not what it may die of later
                runtime.faults.strike(Point.RESUME)
                runtime.open_generation(restore.generation, groups)
            except Superseded:
                continue
            except RestoreError as error:
                runtime.report_restore_failure(restore.generation, error)
                runtime.await_newer(restore.generation)
                continue
            if restore.distrust >= 0:
                self._tiers.checkpointing.discard(restore.distrust)  # also what other ranks still wrote of them
            progress.began = progress.agreed = restore.target  # or there would be no Resume
            progress.attempt = restore.attempt
            if restore.undone:
                progress.begun_before = restore.target + restore.undone + 1
            self._snapshots.assign(resume.buddies, restore.keep)
            self._tiers.checkpointing.assign(resume.writers)
            progress.resumed_ns = time.monotonic_ns()
            progress.first_after_recovery = True
            runtime.is_standby = False
            runtime.page.put("prepared", -1)
            runtime.doubts_of_job = resume.doubts
            return

    def hold_for_save(self) -> None:
        """The script has failed in this process, and it will be killed; but its state may be the last there is."""
        runtime = self._runtime
        runtime.in_step = False
        generation = runtime.generation
        while True:
            runtime.await_newer(generation)
            order = runtime.report_status(self._progress.status(blank=self._blank))
            generation = order.generation
            if isinstance(order, Save):
                self._save(order)

    def _save(self, order: Save) -> None:
        """The job is to end: this rank's part of a last checkpoint. What goes wrong ends the job without one."""
        runtime, state = self._runtime, self._state
        for group in runtime.groups:
            group.detach()
        state.sharded.reset()
        state.pipelines.reset()
        self._snapshots.before_write()
        path = error = ""
        try:
            if not (self._blank or runtime.torn or runtime.page.is_torn):
                if self._progress.version != order.target:
                    raise CheckpointError(f"it holds version {self._progress.version}, not {order.target}")
                self._roll_back()
            if not self._blank:
                path = self._tiers.checkpointing.save(order)
        except (CheckpointError, OSError, TimeoutError) as problem:
            error = f"rank {runtime.rank}: {problem}"
        except StepInterrupted:
            return  # there is a newer order
        if path or error:
            runtime.link.send(
                Saved(
                    process=runtime.process,
                    generation=order.generation,
                    version=order.target,
                    path=path,
                    error=error,
                ),
                report=True,
            )

    def _obey(self, restore: Restore) -> GenerationGroups:
        """Carry out Restore and report; returns the new groups."""
        runtime, progress = self._runtime, self._progress
        runtime.note_recovery(restore.target)
        finish_seconds = _seconds_since(progress.finish_started_ns)
        progress.finish_started_ns = 0
        progress.history = restore.history
        forming = runtime.begin_forming(restore.generation, runtime.table.to_form(runtime.rank))
        for group in runtime.groups:
            group.detach()
        self._state.sharded.reset()
        self._state.pipelines.reset()
        self._snapshots.before_write()
        started_ns = time.monotonic_ns()
        copied_bytes, known = 0, Digests()
        is_target = runtime.rank in restore.targets
        if restore.tier is not FallbackTier.REPLICA:
            copied_bytes = self._go_down(restore)
        elif is_target:
            copied_bytes, known = self._copy(restore)
        elif progress.version != restore.target:
            raise RestoreError(f"rank {runtime.rank} is at version {progress.version}, the target is {restore.target}")
        elif runtime.torn:  # it finished the step by itself, and its optimizer needed others for that
            raise RestoreError(f"the step of rank {runtime.rank} was interrupted where it could not be undone")
        else:
            self._roll_back()
            if restore.targets:
                known = self._offer(restore)
        copy_seconds = _seconds_since(started_ns) if is_target else 0.0
        runtime.faults.strike(Point.ROLLBACK)
        rollback_started_ns = time.monotonic_ns()
        self._layouts.reset()
        rollback_seconds = _seconds_since(rollback_started_ns)
        digest_started_ns = time.monotonic_ns()
        digest = self._state.digest(known)
        digest_seconds = _seconds_since(digest_started_ns)
        reform_started_ns = time.monotonic_ns()
        groups = runtime.await_formed(forming, restore.generation)
        runtime.link.send(
            Restored(
                process=runtime.process,
                rank=runtime.rank,
                generation=restore.generation,
                version=progress.version,
                lineage=progress.lineage,
                state_digest=digest,
                layout_digest=self._state.layout(),
                progress=RestoreProgress(
                    finish_seconds=finish_seconds,
                    reform_seconds=_seconds_since(reform_started_ns),
                    copy_seconds=copy_seconds,
                    copied_bytes=copied_bytes,
                    digest_seconds=digest_seconds,
                    rollback_seconds=rollback_seconds,
                ),
            ),
            report=True,
        )
        return groups

    def _roll_back(self) -> None:
        """Undo the step under way, if it was not committed."""
        if self._transaction.is_open:
            self._transaction.roll_back()
            self._state.clear_gradients()

    def _offer(self, restore: Restore) -> Digests:
        """Serve this rank's state to the replacements; it stays as it is until Resume. Digests come as it is sent."""
        meta = self._state.describe(self._progress.lineage, self._progress.until)
        offer = Offer(restore.generation, restore.target, meta, self._state.replicated())
        self._runtime.server.offer(offer)
        return offer.digests

    def _copy(self, restore: Restore) -> tuple[int, Digests]:
        """Fetch the target version from a source, and the rank-private state from beside the page."""
        runtime = self._runtime
        runtime.page.put("torn", 1)
        client = runtime.fetcher(restore.generation)
        destination = self._state.destination()
        total_bytes = sum(tensor.nbytes for tensor in destination.values())
        part = self._state.shard(runtime.world_size)
        offered = [Address(source.address, source.endpoint) for source in restore.sources if source.shard == part]
        if not offered:
            raise RestoreError(f"rank {runtime.rank} is to hold part {part!r} of the state, which no source has")
        addresses = choose_sources(offered, runtime.rank, total_bytes, _is_here)
        fetched = client.fetch(restore.generation, restore.target, addresses, destination.get)
        meta = fetched.header.meta
        self._state.adopt(unflatten(fetched.header.tree, fetched.tensors), meta["private_buffers"])
        self._state.adopt_attributes(meta)
        if runtime.rank in restore.derived:
            runtime.page.write_private(restore.target, NO_PRIVATE)
        private = self._await_private(restore)
        self._private.adopt(private, restore.target)
        self._batches.take_over(private, restore.target, self._assignment.batch_index)
        self._stand_at(restore.target, meta)
        # Where the bytes went straight into the live tensors, the digests of the transfer are those of the state, if
        # nothing could write there afterwards: objects and attributes that were put back may hold views of it.
        written = private["per_rank"] or {"averages", "carried"} & private.keys() or self._state.attributes.has_state
        in_place = not written and _same_storage(self._state.replicated().tensors, fetched.tensors)
        return fetched.received_bytes, fetched.digests if in_place else {}

    # --- below replicas -------------------------------------------------------------------------------------------
    def _go_down(self, restore: Restore) -> int:
        """Go back to a version that a fallback tier holds; this rank's own state is worthless. Returns bytes copied.

        From here until it is done this rank is blank: should the recovery begin again, it must not be a source of what
        it holds. The snapshot itself is only read.
        """
        runtime, state = self._runtime, self._state
        is_there = not (self._blank or runtime.torn) and self._progress.version == restore.target
        self._blank = True
        self._snapshots.discard_after(restore.target)
        self._tiers.checkpointing.discard_after(restore.target, restore.distrust)
        self._tiers.publishing.withdraw()
        runtime.page.put("torn", 1)
        runtime.page.set_private_versions((-1, -1))  # of versions that are undone
        copied_bytes = 0
        if restore.tier is FallbackTier.CHECKPOINT:
            return self._read_checkpoint(restore)
        is_target = runtime.rank in restore.targets
        slot = None if is_target else self._snapshots.own(restore.target)
        if slot is None and is_there and not is_target:  # this recovery began again, and it had gone back before
            self._roll_back()
            self._blank = False
            runtime.page.put("torn", 0)
            runtime.page.claim_private(restore.target)
            return 0
        if slot is None:
            meta, tree, tensors = self._fetch_snapshot(restore)
            copied_bytes = sum(tensor.nbytes for tensor in tensors)
        else:
            meta, tree, tensors = slot.meta, slot.tree, slot.copy_to(state.destination())
        state.adopt(unflatten(tree, tensors), meta["private_buffers"])
        state.adopt_attributes(meta)
        is_derived = runtime.rank in restore.derived
        private = NO_PRIVATE if is_derived else bytes(raw_bytes(tensors[-1]))
        runtime.page.write_private(restore.target, private)
        private_tree = decode_tree(private)
        self._private.adopt(private_tree, restore.target)
        self._batches.take_over(private_tree, restore.target, self._assignment.batch_index)
        self._stand_at(restore.target, meta)
        if (found := state.digest()) != meta["digest"]:
            self._blank = True
            raise RestoreError(f"the snapshot of version {restore.target} has the digest {found}, not {meta['digest']}")
        return copied_bytes

    def _read_checkpoint(self, restore: Restore) -> int:
        """The first holder of each part reads it from the disk, and serves it to the others. Returns bytes copied."""
        runtime, state, checkpointing = self._runtime, self._state, self._tiers.checkpointing
        copied_bytes = 0
        if runtime.rank in restore.targets:
            part = state.shard(runtime.world_size)
            addresses = [Address(s.address, s.endpoint) for s in restore.sources if s.shard == part]
            client = runtime.fetcher(restore.generation)
            fetched = client.fetch(restore.generation, restore.target, addresses[:1], state.destination().get)
            meta, copied_bytes = fetched.header.meta, fetched.received_bytes
            state.adopt(unflatten(fetched.header.tree, fetched.tensors), meta["private_buffers"])
            state.adopt_attributes(meta)
        else:
            meta = checkpointing.go_back(restore.target)
            runtime.server.offer(Offer(restore.generation, restore.target, meta, state.replicated()))
        checkpointing.take_private(restore.target)
        self._private.keep(restore.target)
        self._stand_at(restore.target, meta)
        return copied_bytes

    def _fetch_snapshot(self, restore: Restore) -> tuple[dict[str, Any], Any, list[torch.Tensor]]:
        """This rank's own, or one of the same part of the state, out of another rank's memory."""
        rank, part = self._runtime.rank, self._state.shard(self._runtime.world_size)
        own = [source for source in restore.sources if source.of == rank]
        found = own or [source for source in restore.sources if source.shard == part]
        if not found:
            raise RestoreError(f"rank {rank} is to hold part {part!r} of the state, of which no source has a snapshot")
        client = self._runtime.fetcher(restore.generation)
        address, destination = Address(found[0].address, found[0].endpoint), self._state.destination()
        fetched = client.fetch(restore.generation, restore.target, [address], destination.get, of=found[0].of)
        return fetched.header.meta, fetched.header.tree, fetched.tensors

    def _stand_at(self, version: int, meta: dict[str, Any]) -> None:
        """This rank holds `version`, and nothing of a step."""
        runtime, progress, page = self._runtime, self._progress, self._runtime.page
        progress.version, progress.lineage, progress.until = version, meta["lineage"], meta["until"]
        self._state.gradients_to_none = meta["gradients_to_none"]
        self._state.adopt_modes(meta.get("modes", {}))
        adopt_settings(meta.get("settings", {}))
        if differing := structure_differs(self._state.modules, meta.get("structure", {})):
            self._runtime.doubt(
                f"{differing}: built or hooked otherwise in the replacement than where its state was copied from. "
                "Change modules before relight.Training(...), or in every step anew",
                version,
            )
        self._transaction.close()
        self._state.clear_gradients()
        page.claim_private(version)
        self._blank = runtime.torn = False
        page.put("torn", 0)
        page.put("version", version)

    def _await_private(self, restore: Restore) -> dict[str, Any]:
        """From beside the page, where the agent puts it; from another host it may still be on its way."""
        runtime = self._runtime
        deadline = time.monotonic() + PRIVATE_SECONDS
        while runtime.page.read_private(restore.target) is None and time.monotonic() < deadline:
            if not runtime.is_current(restore.generation):
                raise Superseded
            time.sleep(_POLL_SECONDS)
        return runtime.page.read_private_tree(restore.target)


def _is_here(address: Address) -> bool:
    """Whether this source is on this host, as far as can be told without asking it."""
    return os.path.exists(address.path)


def _same_storage(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """And in host memory: what a device wrote is not what the transfer digested."""
    return len(left) == len(right) and all(
        a.data_ptr() == b.data_ptr() and a.device.type == "cpu" for a, b in zip(left, right, strict=True)
    )


def _seconds_since(start_ns: int) -> float:
    return (time.monotonic_ns() - start_ns) / 1e9 if start_ns else 0.0
