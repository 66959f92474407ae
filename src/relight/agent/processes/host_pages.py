"""The pages of a host: of its live workers, and of dead ones whose private state may still be asked for."""

import contextlib
from collections.abc import Iterable

from relight.agent.processes.adoption import open_pages
from relight.agent.processes.link import MAX_RELAYED_BYTES
from relight.agent.processes.process import Process
from relight.agent.processes.process_table import Record
from relight.agent.processes.readings.page import Page, Pages
from relight.core.protocol.position import Position
from relight.wire.messages import CopyPrivate, PrivateState, TakePrivate


class HostPages:
    """Finds the page of a process, dead or alive, until the process is released."""

    def __init__(self, adopted: Iterable[Process]) -> None:
        """Share the pages that an adopted process holds, or create new ones."""
        self.pages = _find_pages(adopted)
        self._pages_of: dict[str, Page] = {}

    def add(self, process: Process) -> None:
        """Keep the page of a process."""
        self._pages_of[process.name] = process.page

    def recover(self, record: Record) -> Position:
        """Keep the page of a process that died while there was no agent; return its last position, if there is one."""
        if record.pages == self.pages.token:
            with contextlib.suppress(OSError, ValueError):
                page = self._pages_of[record.process] = self.pages.at(record.page)
                return page.position()
        return Position()

    def release(self, process: str) -> None:
        """Give back the page of a dead process."""
        page = self._pages_of.pop(process, None)
        if page is not None:
            page.clear()

    def copy_private(self, order: CopyPrivate) -> None:
        """Copy private state from one page to another; no effect if the source has not that version."""
        source, target = self._pages_of.get(order.source), self._pages_of.get(order.target)
        if source is None or target is None:
            return
        payload = source.read_private(order.version)
        if payload is not None:
            target.inherit(order.version, payload, source.batch_mark())

    def read_private(self, order: TakePrivate) -> PrivateState | None:
        """Return private state for another host; None if the source has not that version."""
        source = self._pages_of.get(order.source)
        payload = source.read_private(order.version) if source is not None else None
        if source is None or payload is None:
            return None
        problem = ""
        if len(payload) > MAX_RELAYED_BYTES:
            problem = f"{order.source} left {len(payload)} bytes, and no more than {MAX_RELAYED_BYTES} can be moved"
            payload = b""
        return PrivateState(
            source=order.source,
            target=order.target,
            version=order.version,
            payload=payload,
            batch=source.batch_mark(),
            problem=problem,
        )


def _find_pages(adopted: Iterable[Process]) -> Pages:
    for process in adopted:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return open_pages(process.pid)
    return Pages.create()
