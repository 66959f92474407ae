"""Reports of a worker to the controller that a failure calls for."""

import time
from collections.abc import Sequence

from relight.core.protocol.events import CollectiveFailed, RestoreFailed, StateDiffers, Stopped
from relight.core.protocol.fault import Point
from relight.core.protocol.position import Phase
from relight.core.worker.events import CollectiveBroke
from relight.core.worker.worker import Worker
from relight.training.connection.link import AgentLink
from relight.training.connection.page import PositionPage
from relight.training.process.controller.orders import Orders
from relight.training.process.faults import Faults
from relight.training.process.holdings import Holdings
from relight.transfer.restore.server import RestoreServer


class Reports:
    """Sends them, and waits for the Stop that must follow."""

    def __init__(
        self,
        link: AgentLink,
        process: str,
        worker: Worker,
        page: PositionPage,
        faults: Faults,
        orders: Orders,
        patience_seconds: float,
    ) -> None:
        """`patience_seconds`: for the Stop that explains a broken collective."""
        self._link = link
        self._process = process
        self._worker = worker
        self._page = page
        self._faults = faults
        self._orders = orders
        self._patience_seconds = patience_seconds
        self._broken = -1, ""  # the newest generation in which a collective broke, and why

    def status(self, holdings: Holdings, server: RestoreServer) -> None:
        """Report what this rank holds, as a basis of the decision."""
        status, page, arrived = self._worker.status(), self._page, self._orders.stop_arrived_ns
        page.stamp(Phase.PARKED)
        self._faults.recovery = status.generation - 1
        self._faults.strike(Point.STOP)
        page.put("generation", status.generation)
        page.put("collectives", 0)
        self._link.send(
            Stopped(
                process=self._process,
                rank=self._worker.rank,
                generation=status.generation,
                step=status.step,
                version=status.version,
                lineage=status.lineage,
                prepared=status.prepared,
                torn=status.torn,
                torn_by=status.torn_by,
                blank=status.blank,
                stop_seconds=(time.monotonic_ns() - arrived) / 1e9 if arrived else 0.0,
                derivable=holdings.is_derivable(),
                restore_address=server.address.path,
                restore_endpoint=server.address.endpoint,
                snapshots=holdings.kept_snapshots(),
                checkpoints=holdings.readable_checkpoints(),
                agreed=status.agreed,
                sound=status.sound,
                wrote=status.wrote,
                alone=status.alone,
                at_collective=status.at_collective,
                gives=status.gives if status.gives >= 0 and holdings.has_begun_state() else -1,
                comes=status.comes,
            ),
            report=True,
        )

    def await_stop(self, summary: str) -> bool:
        """Report a broken collective and wait for Stop. Returns False if none comes."""
        if self._orders.handle(CollectiveBroke()):
            self._broken = self._worker.generation, summary
            self._send_broken(summary)
        return self._orders.await_stop(self._patience_seconds)

    def repeat_broken(self) -> None:
        """Report a broken collective of this generation again: an agent that died may not have passed it on."""
        generation, summary = self._broken
        if generation == self._worker.generation and not self._worker.closed:
            self._send_broken(summary)

    def _send_broken(self, summary: str) -> None:
        self._link.send(
            CollectiveFailed(
                process=self._process,
                rank=self._worker.rank,
                generation=self._worker.generation,
                step=self._faults.step,
                summary=summary,
                noticed_ns=time.monotonic_ns(),
            )
        )

    def await_replacement(self, version: int, digests: Sequence[int], tensors: Sequence[str]) -> None:
        """Report that the ranks' states differ, and wait until the controller has decided which is wrong."""
        self._link.send(
            StateDiffers(
                process=self._process,
                rank=self._worker.rank,
                generation=self._worker.generation,
                step=version,
                digests=tuple(digests),
                tensors=tuple(tensors),
                noticed_ns=time.monotonic_ns(),
            )
        )
        self._orders.await_stop()

    def restore_failed(self, generation: int, evidence: str) -> None:
        """Report that this rank could not be restored."""
        failed = RestoreFailed(process=self._process, generation=generation, evidence=evidence)
        self._link.send(failed, report=True)
