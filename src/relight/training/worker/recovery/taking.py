"""Ways of a recovery's target version into this process: copied, recalled from a snapshot, or read."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from relight.core.protocol.commands import FallbackTier, Restore
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.errors import RestoreError
from relight.training.carried.rank_values import RankValues
from relight.training.checkpoint.checkpointing import Checkpointing
from relight.training.checkpoint.snapshots import Snapshots
from relight.training.connection.page import NO_PRIVATE
from relight.training.data.batches import Batches
from relight.training.process.controller.orders import Superseded
from relight.training.process.private import PrivateState
from relight.training.process.runtime import Runtime
from relight.training.publish.publishing import Publishing
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.training.transaction.transaction import Transaction
from relight.training.worker.recovery.code_between import CodeBetween
from relight.transfer.io.codec import Flat, decode_tree, raw_bytes, unflatten
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


@dataclass
class RestoreWork:
    """The cost and the knowledge of a restore so far."""

    began_ns: int = 0  # to take the state
    copied_bytes: int = 0
    finish_seconds: float = 0.0
    copy_seconds: float = 0.0
    rollback_seconds: float = 0.0
    digest_seconds: float = 0.0
    reform_seconds: float = 0.0
    known: Digests = field(default_factory=dict)
    digest: str = ""
    meta: dict[str, Any] = field(default_factory=dict)  # of the state that was taken


class StateTaking:
    """Takes the state that was decided on; `work` says what that has cost."""

    def __init__(
        self,
        runtime: Runtime,
        state: TrackedState,
        batches: Batches,
        assignment: Assignment,
        private: PrivateState,
        tiers: FallbackTiers,
        transaction: Transaction,
        rank_values: RankValues,
        code_between: CodeBetween,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._batches = batches
        self._assignment = assignment
        self._private = private
        self._tiers = tiers
        self._snapshots = tiers.snapshots
        self._transaction = transaction
        self._rank_values = rank_values
        self._code_between = code_between
        self.work = RestoreWork()
        self.carry_outs: Mapping[type[act.Action], Callable[..., happened.Event | None]] = {
            act.RollBack: self._roll_back,
            act.Offer: self._offer,
            act.KeepPrivateAnew: self._keep_private,
            act.Copy: self._copy,
            act.TakeResults: self._take_results,
            act.DiscardUndone: self._discard_undone,
            act.RecallSnapshot: self._recall_snapshot,
            act.FetchSnapshot: self._fetch_snapshot,
            act.ReadCheckpoint: self._read_checkpoint,
            act.ClaimVersion: self._claim_version,
        }

    @property
    def _order(self) -> Restore:
        order = self._worker.order
        assert isinstance(order, Restore)
        return order

    # --- the state --------------------------------------------------------------------------------------------------
    @property
    def began_with(self) -> Flat | None:
        """The state with which code between two steps began, if targets run it; None: the state of now counts."""
        serves = self._order.runs_code and self._runtime.rank not in self._order.targets
        return self._code_between.began_with() if serves else None

    def _roll_back(self, action: act.RollBack | None = None) -> None:  # noqa: ARG002
        """Undo the step under way, if it was not committed; a replacement has no gradients of older ones either.

        What an undone attempt has kept for the next version is withdrawn: the next one may agree on other buffers.
        """
        self._transaction.roll_back()
        self._code_between.forget_given()
        self._runtime.page.withdraw_private(self._worker.version + 1)
        if not self._worker.at_collective:  # the code around it may read them
            self._state.gradients.clear()

    def _offer(self, action: act.Offer) -> None:  # noqa: ARG002
        """Serve this rank's state to the replacements; it stays as it is until Resume. Digests come as it is sent."""
        worker, order, work = self._worker, self._order, self.work
        if order.runs_code:
            if not self._code_between.has_begun_state():  # of code that a rank ran once it had finished the step
                raise RestoreError(f"rank {self._runtime.rank} has changed the state in the code between two steps")
            meta = self._code_between.describe()
        else:
            meta = work.meta or self._state.describe(worker.lineage, worker.until)
            meta = {**meta, "noticed": self._private.noticed(), **self._private.late_values(order.target)}
        offer = Offer(order.generation, order.target, meta, self.began_with or self._state.replica.flat())
        self._runtime.restores.server.offer(offer)
        if order.tier is FallbackTier.REPLICA:
            work.known = offer.digests

    def _keep_private(self, action: act.KeepPrivateAnew) -> None:  # noqa: ARG002
        """Keep what this rank has for itself, as code between two steps has left it."""
        version = self._worker.version
        self._private.is_due(version)  # it looks at the values that are kept
        self._private.keep(version, between=True)

    def _copy(self, action: act.Copy) -> happened.Event:  # noqa: ARG002
        """Fetch the target version from a source, and the rank-private state from beside the page."""
        runtime, restore, work = self._runtime, self._order, self.work
        if restore.tier is FallbackTier.CHECKPOINT:
            return self._copy_checkpoint(restore)
        runtime.page.put("torn", 1)
        client = runtime.restores.fetcher(restore.generation)
        destination = self._state.replica.destination()
        total_bytes = sum(tensor.nbytes for tensor in destination.values())
        part = self._state.division.shard(runtime.world_size)
        offered = [Address(source.address, source.endpoint) for source in restore.sources if source.shard == part]
        if not offered:
            raise RestoreError(f"rank {runtime.rank} is to hold part {part!r} of the state, which no source has")
        addresses = choose_sources(offered, runtime.rank, total_bytes, _is_here)
        fetched = client.fetch(restore.generation, restore.target, addresses, destination.get)
        meta = fetched.header.meta
        self._adopt(fetched.header.tree, fetched.tensors, meta)
        self._code_between.take(meta, restore)
        self._state.adopt_attributes(meta)
        if runtime.rank in restore.derived:
            runtime.page.write_private(restore.target, NO_PRIVATE)
            self._doubt_what_is_lost()
        private = self._await_private(restore)
        self._private.adopt(private, restore.target, meta)
        self._batches.take_over(private, restore.target, self._assignment.batch_index)
        # Where the bytes went straight into the live tensors, the digests of the transfer are those of the state, if
        # nothing could write there afterwards: objects and attributes that were put back may hold views of it.
        written = private["per_rank"] or {"averages", "carried"} & private.keys() or self._state.attributes.has_state
        in_place = not written and _same_storage(self._state.replica.flat().tensors, fetched.tensors)
        work.copied_bytes, work.known = fetched.received_bytes, fetched.digests if in_place else {}
        return self._taken(meta)

    def _take_results(self, action: act.TakeResults) -> happened.Event:  # noqa: ARG002
        """Fetch what collectives have given, and nothing else, for code that this rank goes on to run."""
        restore = self._order
        sources = [Address(source.address, source.endpoint) for source in restore.sources]
        address = choose_sources(sources, self._runtime.rank, 0, _is_here)[0]
        client = self._runtime.restores.fetcher(restore.generation)
        self._code_between.take(client.fetch_meta(restore.generation, restore.target, address), restore)
        return happened.ResultsTaken()

    def _adopt(self, tree: Any, tensors: list[torch.Tensor], meta: dict[str, Any]) -> None:
        self._rank_values.note_built()
        if why := self._state.adopt(unflatten(tree, tensors), meta):
            self._runtime.notices.doubt(why, self._order.target)

    # --- below replicas -------------------------------------------------------------------------------------------
    def _discard_undone(self, action: act.DiscardUndone) -> None:  # noqa: ARG002
        restore, page = self._order, self._runtime.page
        self._snapshots.discard_after(restore.target)
        self._tiers.checkpointing.discard_after(restore.target, restore.distrust)
        self._tiers.publishing.withdraw()
        page.put("torn", 1)
        page.forget_private()  # of versions that are undone

    def _doubt_what_is_lost(self) -> None:
        """Tell of variables that no step needs, as nothing is left of this rank's private state."""
        if why := self._runtime.holdings.doubt_if_lost():
            self._runtime.notices.doubt(why, step=self._order.target - 1)

    def _recall_snapshot(self, action: act.RecallSnapshot) -> happened.Event:  # noqa: ARG002
        slot = self._snapshots.own(self._order.target)
        if slot is None:
            return happened.SnapshotMissing()
        return self._adopt_snapshot(slot.meta, slot.tree, slot.copy_to(self._state.replica.destination()))

    def _adopt_snapshot(self, meta: dict[str, Any], tree: Any, tensors: list[torch.Tensor]) -> happened.StateTaken:
        """Take a snapshot for the state of this rank; the snapshot itself is only read."""
        runtime, state, restore = self._runtime, self._state, self._order
        self._adopt(tree, tensors, meta)
        state.adopt_attributes(meta)
        is_derived = runtime.rank in restore.derived
        private = NO_PRIVATE if is_derived else bytes(raw_bytes(tensors[-1]))
        runtime.page.write_private(restore.target, private)
        if is_derived:
            self._doubt_what_is_lost()
        private_tree = decode_tree(private)
        self._private.adopt(private_tree, restore.target)
        self._batches.take_over(private_tree, restore.target, self._assignment.batch_index)
        taken = self._taken(meta)
        if (found := state.replica.digest()) != meta["digest"]:
            raise RestoreError(f"the snapshot of version {restore.target} has the digest {found}, not {meta['digest']}")
        return taken

    def _copy_checkpoint(self, restore: Restore) -> happened.StateTaken:
        """Get this rank's part from the rank that has read it from the disk."""
        runtime, state = self._runtime, self._state
        part = state.division.shard(runtime.world_size)
        addresses = [Address(s.address, s.endpoint) for s in restore.sources if s.shard == part]
        client = runtime.restores.fetcher(restore.generation)
        fetched = client.fetch(restore.generation, restore.target, addresses[:1], state.replica.destination().get)
        meta, self.work.copied_bytes = fetched.header.meta, fetched.received_bytes
        self._adopt(fetched.header.tree, fetched.tensors, meta)
        state.adopt_attributes(meta)
        return self._take_checkpoint(meta)

    def _read_checkpoint(self, action: act.ReadCheckpoint) -> happened.StateTaken:  # noqa: ARG002
        """Read this rank's part from the disk, for itself and for the others that hold the same part."""
        restore = self._order
        meta = self._tiers.checkpointing.go_back(restore.target)
        return self._take_checkpoint(meta)

    def _take_checkpoint(self, meta: dict[str, Any]) -> happened.StateTaken:
        target = self._order.target
        self._tiers.checkpointing.take_private(target)
        self._private.keep(target)
        return self._taken(meta)

    def _fetch_snapshot(self, action: act.FetchSnapshot) -> happened.StateTaken:  # noqa: ARG002
        """This rank's own, or one of the same part of the state, out of another rank's memory."""
        restore = self._order
        rank, part = self._runtime.rank, self._state.division.shard(self._runtime.world_size)
        own = [source for source in restore.sources if source.of == rank]
        found = own or [source for source in restore.sources if source.shard == part]
        if not found:
            raise RestoreError(f"rank {rank} is to hold part {part!r} of the state, of which no source has a snapshot")
        client = self._runtime.restores.fetcher(restore.generation)
        address, destination = Address(found[0].address, found[0].endpoint), self._state.replica.destination()
        fetched = client.fetch(restore.generation, restore.target, [address], destination.get, of=found[0].of)
        self.work.copied_bytes = sum(tensor.nbytes for tensor in fetched.tensors)
        return self._adopt_snapshot(fetched.header.meta, fetched.header.tree, fetched.tensors)

    def _taken(self, meta: dict[str, Any]) -> happened.StateTaken:
        """The state of the target version is here: take over what belongs to it, and drop what was of a step."""
        version = self._order.target
        self.work.meta = meta
        if why := self._state.adopt_besides(meta):
            self._runtime.notices.doubt(why, version)
        self._take_rank_values(meta.get("rank_values", {}))
        self._transaction.close()
        self._state.gradients.clear()
        self._state.gradients.adopt_missing(meta.get("missing_gradients", ()))
        return happened.StateTaken(version, meta["lineage"], meta["until"])

    def _take_rank_values(self, described: dict[str, Any]) -> None:
        runtime = self._runtime
        described = self._state.rank_values or described
        if why := self._rank_values.adopt(described, runtime.world_size, runtime.built_as, runtime.rank):
            runtime.notices.doubt(why, self._order.target)
        else:
            self._state.rank_values = described

    def _claim_version(self, action: act.ClaimVersion) -> None:  # noqa: ARG002
        version, page = self._order.target, self._runtime.page
        page.claim_private(version)
        page.put("torn", 0)
        page.put("version", version)

    def _await_private(self, restore: Restore) -> dict[str, Any]:
        """From beside the page, where the agent puts it; from another host it may still be on its way."""
        runtime = self._runtime
        deadline = time.monotonic() + PRIVATE_SECONDS
        while runtime.page.read_private(restore.target) is None and time.monotonic() < deadline:
            if not runtime.orders.is_current(restore.generation):
                raise Superseded
            time.sleep(_POLL_SECONDS)
        return runtime.page.read_private_tree(restore.target)


def _is_here(address: Address) -> bool:
    """Return whether this source is on this host, as far as can be told without asking it."""
    return os.path.exists(address.path)


def _same_storage(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """And in host memory: what a device wrote is not what the transfer digested."""
    return len(left) == len(right) and all(
        a.data_ptr() == b.data_ptr() and a.device.type == "cpu" for a, b in zip(left, right, strict=True)
    )
