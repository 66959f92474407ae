"""Starts the processes of a host: each anew, or as a fork of the template process for --preload."""

from collections.abc import Callable

from relight.agent.processes.host_pages import HostPages
from relight.agent.processes.process import Launch, Process, spawn, template_environment
from relight.agent.processes.template import Template
from relight.core.protocol.commands import Spawn


class Starter:
    """Starts what the controller orders. Without a template process that works, each process is a new one."""

    def __init__(
        self, launch: Launch, pages: HostPages, shared_barrier: int | None, say: Callable[[str], None]
    ) -> None:
        self._launch = launch
        self._pages = pages
        self._shared_barrier = shared_barrier
        self._say = say
        self._template: Template | None = None

    async def preload(self) -> None:
        """Start the template process and wait for it; without one, say why."""
        modules = self._launch.settings.preload
        if not modules:
            return
        try:
            self._template = Template(modules, template_environment(self._launch))
            refusal = await self._template.ready()
        except OSError as error:
            refusal = str(error)
        if refusal:
            self._give_up_template(refusal)

    def start(self, order: Spawn) -> Process:
        """Start a process. Raises OSError or ValueError if it cannot be started."""
        arguments = (self._launch, order.process, order.rank, order.slot, self._pages.pages, self._shared_barrier)
        if self._template is not None:
            try:
                return spawn(*arguments, self._template)
            except OSError as error:
                self._give_up_template(str(error))
        return spawn(*arguments)

    def close(self) -> None:
        """End the template process. What was started lives on."""
        if self._template is not None:
            self._template.close()
            self._template = None

    def _give_up_template(self, why: str) -> None:
        self._say(f"--preload {self._launch.settings.preload}: {why}; each worker imports what it needs by itself")
        self.close()
