"""relight as a checkpoint engine of verl: it brings the actor's weights to rollout workers that may die and come back.

Written against verl 0.9.1: `CheckpointEngine` and `CheckpointEngineManager` in verl/checkpoint_engine/base.py, and
`update_weights` in verl/workers/engine_workers.py. verl imports this module where its configuration names it:

    actor_rollout_ref.rollout.checkpoint_engine.backend=relight
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=relight.integrations.verl

There is no communicator of fixed members. The actor's rank 0 publishes, and the rollout workers that are there
receive. One that dies during an update is left out, and the others get all of it. One that comes (`add_replicas`) takes
part from the next update on; nothing is formed again for it.

Weights travel in chunks of `update_weights_bucket_megabytes`, or of one tensor if that is larger. The actor's rank 0
holds two chunks, the one that travels and the one that is being gathered; a rollout worker holds three. Rank 0 of the
actor and all rollout workers must be on one machine.

Not run here: verl as a whole, which needs GPUs. Tested, where verl is installed: this class, made by verl's own
registry and called in the order in which `CheckpointEngineManager` calls it, in processes that are killed.
"""

import asyncio
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from relight.errors import TransferError, UsageError
from relight.transfer.engine.receiver import Receiver
from relight.transfer.publish.publisher import Publisher
from relight.transfer.tensors.weights import TensorSource

BACKEND = "relight"
_CHUNK = "relight.chunk"  # a tensor of each chunk: the step (-1: none named), its number, 1 if it is the last
_LOOK_SECONDS = 0.01

Chunk = dict[str, torch.Tensor]


@CheckpointEngineRegistry.register(BACKEND)
class RelightCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine in each rank of the actor, and in each rollout worker.

    Args:
        bucket_size: bytes of a chunk.
        is_master: as verl passes it; the actor's rank 0 sends in any case.
        place: path of a socket to use. Default: None, one in the temp directory of the actor's rank 0.
        timeout_seconds: how long to wait for rollout workers that are not connected, or for the next chunk; half of it
            for a worker that takes no chunks.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, place: str | None = None, timeout_seconds: float = 60.0
    ) -> None:
        del is_master
        self._bucket_size, self._timeout_seconds = bucket_size, timeout_seconds
        self._name = f"relight-verl-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._own_place = place or os.path.join(tempfile.gettempdir(), self._name)
        self._sends = False
        self._workers: frozenset[str] = frozenset()  # names of those that take part
        self._publisher: Publisher | None = None
        self._inbox: _Inbox | None = None

    # --- what the manager calls, in this order, for each update -------------------------------------------------------
    def prepare(self) -> dict[str, Any]:
        """Say where this process is, and where it would publish."""
        return {"host": socket.gethostname(), "place": self._own_place, "name": self._name}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Have the actor's rank 0 publish, and all rollout workers receive. Raises UsageError: other machines."""
        sender, workers = metadata[0], metadata[actor_wg_world_size:]
        elsewhere = sorted({worker["host"] for worker in workers} - {sender["host"]})
        if elsewhere:
            raise UsageError(
                f"relight moves verl's weights within one machine: the actor's rank 0 is on {sender['host']}, and "
                f"there are rollout workers on {', '.join(elsewhere)}. Use one machine, or the backend nccl"
            )

        names = [worker["name"] for worker in workers]

        def arguments(roles: list[str]) -> dict[str, list[Any]]:
            count = len(roles)
            return {"role": roles, "place": [sender["place"]] * count, "workers": [names] * count}

        idle = ["idle"] * (actor_wg_world_size - 1)
        return arguments(["sender", *idle]), arguments(["receiver"] * rollout_world_size)

    def init_process_group(self, role: str, place: str, workers: Sequence[str]) -> None:
        """Take up a role; a process that had it before keeps what it has."""
        self._sends, self._workers = role == "sender", frozenset(workers)
        if self._sends and self._publisher is None:
            # Less than others wait for their next chunk: a worker that takes no more is left out before they give up.
            self._publisher = Publisher(place, commit_timeout_seconds=self._timeout_seconds / 2)
        if role == "receiver" and (self._inbox is None or self._inbox.place != place):
            self._close_inbox()
            self._inbox = _Inbox(place, self._name)
        if self._inbox is not None:
            self._inbox.open()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Send all weights. On ranks that do not send, only take part in gathering them.

        Raises TransferError: the rollout workers are not there, or none of them is left.
        """
        if not self._sends:
            for _ in weights:
                pass
            return
        publisher = self._publisher
        assert publisher is not None
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._await_workers, publisher)
        version = max(engine.version for engine in publisher.engines())
        step = -1 if global_steps is None else global_steps
        under_way: Any = None
        for number, (chunk, is_last) in enumerate(_chunks(weights, self._bucket_size)):
            if under_way is not None:
                await under_way
            chunk[_CHUNK] = torch.tensor([step, number, int(is_last)], device="cpu")
            version += 1
            # At once, and beside the next chunk's gathering, which leaves the event loop no time.
            under_way = loop.run_in_executor(None, self._publish, publisher, chunk, version)
        if under_way is not None:
            await under_way

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield all weights of one update as they come.

        Raises TransferError: a chunk is missing, or does not come in time. Then the weights of this worker are a
        mixture; it gets whole ones with the next update.
        """
        inbox = self._inbox
        if inbox is None:
            raise UsageError("init_process_group must be called before receive_weights")
        expected = 0
        is_last = False
        try:
            while not is_last:
                chunk = await asyncio.to_thread(inbox.take, self._timeout_seconds)
                step, number, is_last = chunk.pop(_CHUNK).tolist()
                if global_steps is not None and step != global_steps:
                    is_last = False
                    continue  # of an update that this worker did not take to its end
                if number not in (0, expected):
                    raise TransferError(f"chunk {expected} of step {step} did not come here: the next one is {number}")
                expected = number + 1  # 0 again: the sender has begun once more
                for name in list(chunk):
                    yield name, chunk.pop(name)
        finally:
            inbox.shut()

    def finalize(self) -> None:
        """Keep everything for the next update."""

    # ------------------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Send and receive no more."""
        self._close_inbox()
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _close_inbox(self) -> None:
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()

    def _await_workers(self, publisher: Publisher) -> None:
        end = time.monotonic() + self._timeout_seconds
        while len(there := self._connected(publisher)) < len(self._workers):
            if time.monotonic() > end:
                raise TransferError(
                    f"{len(there)} of {len(self._workers)} rollout workers are connected after "
                    f"{self._timeout_seconds:g} s: take those that died out of the manager (remove_replicas)"
                )
            time.sleep(_LOOK_SECONDS)

    def _connected(self, publisher: Publisher) -> frozenset[str]:
        """Workers of this update that are there; one that the manager has left out may still be connected."""
        return self._workers & {engine.name for engine in publisher.engines()}

    def _publish(self, publisher: Publisher, chunk: Chunk, version: int) -> None:
        only = self._connected(publisher)
        result = publisher.begin(TensorSource(chunk), version=version, only=only).wait() if only else None
        if result is None or result.error:
            raise TransferError(f"no rollout worker is left{f': {result.error}' if result else ''}")


class _Inbox:
    """The newest chunk at a rollout worker: the next one is held back until it was taken.

    Once a worker has left an update the rest of it is dropped, and does not hold up the sender.
    """

    def __init__(self, place: str, name: str) -> None:
        self.place = place
        self._changed = threading.Condition()
        self._chunk: Chunk | None = None
        self._is_open = False
        self._receiver = Receiver(place, load=self._put, name=name)

    def open(self) -> None:
        """An update begins in which this worker takes part."""
        with self._changed:
            self._chunk, self._is_open = None, True

    def shut(self) -> None:
        """Nothing more of this update is wanted."""
        with self._changed:
            self._chunk, self._is_open = None, False
            self._changed.notify_all()

    def _put(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand on copies of the tensors, on the receiver's thread, which uses its tensors again."""
        chunk = {name: tensor.clone() for name, tensor in pairs}
        with self._changed:
            self._changed.wait_for(lambda: self._chunk is None or not self._is_open)
            if self._is_open:
                self._chunk = chunk
                self._changed.notify_all()

    def take(self, timeout_seconds: float) -> Chunk:
        """Return the next chunk. Raises TransferError: none came within the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunk is not None, timeout_seconds)
            chunk, self._chunk = self._chunk, None
            self._changed.notify_all()
        if chunk is None:
            raise TransferError(f"no weights came within {timeout_seconds:g} s")
        return chunk

    def close(self) -> None:
        self.shut()
        self._receiver.close()


def _chunks(weights: Iterable[tuple[str, torch.Tensor]], size: int) -> Iterator[tuple[Chunk, bool]]:
    """Copy the weights to host memory in chunks of some `size` bytes; with each, whether it is the last one."""
    chunk: Chunk = {}
    held = 0
    for name, tensor in weights:
        if chunk and held + tensor.nbytes > size:
            yield chunk, False
            chunk, held = {}, 0
        chunk[name] = tensor.detach().to("cpu", copy=True)
        held += tensor.nbytes
    yield chunk, True
