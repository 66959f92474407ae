"""Reports the health of a host's GPUs to people, and their faults to the controller."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from relight.agent.connection.session import ControllerSession
from relight.core.protocol.events import HostFaulty
from relight.device.nvidia import Gpus
from relight.wire.status import Gpu, GpuStatus

GPU_SECONDS = 5.0  # between two looks
MAX_FAULTS = 8  # of one host; the first one decides


class GpuWatch:
    """Reports the health of the GPUs when it has changed."""

    def __init__(self, agent: str, session: ControllerSession) -> None:
        self._agent = agent
        self._session = session
        self._reported: tuple[Gpu, ...] = ()
        self._faults: set[str] = set()

    def start(self) -> None:
        """Watch in a daemon thread: a driver in trouble may block its caller forever."""
        loop = asyncio.get_running_loop()

        def call(report: Callable[[Any], None], found: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent ends
                loop.call_soon_threadsafe(report, found)

        def watch() -> None:
            gpus = Gpus.find()
            while gpus is not None:
                call(self._report, gpus.sample())
                due = time.monotonic() + GPU_SECONDS
                while fault := gpus.next_fault(due - time.monotonic()):
                    call(self._report_fault, fault)
                if (left := due - time.monotonic()) > 0:
                    time.sleep(left)

        threading.Thread(target=watch, name="gpus", daemon=True).start()

    def _report(self, found: tuple[Gpu, ...]) -> None:
        if found != self._reported and self._session.mention(GpuStatus(agent=self._agent, gpus=found), if_idle=True):
            self._reported = found

    def _report_fault(self, fault: str) -> None:
        """Tell the controller, or the next one. Broken hardware may report the same again and again."""
        if fault not in self._faults and len(self._faults) < MAX_FAULTS:
            self._faults.add(fault)
            self._session.report(HostFaulty(agent=self._agent, reason=fault))
