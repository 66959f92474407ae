"""The live page as a child of `relight run`."""

import os

from relight.children import Child, describe_exit, start_module
from relight.launch.progress import JobProgress
from relight.terminal import Screen


class DashboardChild:
    """Serves the live page. It is not restarted: `relight dashboard` starts another."""

    def __init__(self, run_dir: str, address: str, screen: Screen, progress: JobProgress) -> None:
        self._run_dir = run_dir
        self._address = address
        self._screen = screen
        self._progress = progress
        self.child: Child | None = None

    async def run(self) -> None:
        """Start it, show what it says, and its end."""
        dashboard = self.child = await start_module(
            *("relight.dashboard", "--run-dir", self._run_dir),
            *("--address", self._address, "--parent", str(os.getpid())),
            pipe=True,
        )
        async for line in dashboard.output:
            self._screen.say(line.decode(errors="replace").strip().removeprefix("relight: "), "warning")
        status = await dashboard.wait()
        if not self._progress.ending.is_set() and not self._progress.signal:
            self._screen.say(
                f"the dashboard {describe_exit(status)}; training goes on. "
                f"`relight dashboard {self._run_dir}` starts another",
                "warning",
            )
