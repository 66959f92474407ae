"""Reports the health of a host's GPUs."""

import asyncio
import contextlib
import threading
import time

from relight.agent.connection.session import ControllerSession
from relight.device.nvidia import Gpus
from relight.wire.status import Gpu, GpuStatus

GPU_SECONDS = 5.0  # between two looks


class GpuWatch:
    """Reports the health of the GPUs when it has changed."""

    def __init__(self, agent: str, session: ControllerSession) -> None:
        self._agent = agent
        self._session = session
        self._reported: tuple[Gpu, ...] = ()

    def start(self) -> None:
        """Watch in a daemon thread: a driver in trouble may block its caller for ever."""
        loop = asyncio.get_running_loop()

        def watch() -> None:
            gpus = Gpus.find()
            while gpus is not None:
                found = gpus.sample()
                with contextlib.suppress(RuntimeError):  # the loop is closed: the agent ends
                    loop.call_soon_threadsafe(self._report, found)
                time.sleep(GPU_SECONDS)

        threading.Thread(target=watch, name="gpus", daemon=True).start()

    def _report(self, found: tuple[Gpu, ...]) -> None:
        if found != self._reported and self._session.mention(GpuStatus(agent=self._agent, gpus=found), if_idle=True):
            self._reported = found
