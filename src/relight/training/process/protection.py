"""Collectives of a script that a recovery can repeat, and the fate of one that it cuts short."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from relight.core.protocol.position import Phase
from relight.core.worker.events import CutShort, WentOnAlone
from relight.core.worker.worker import Worker
from relight.errors import StepInterrupted
from relight.training.carried.code.source import lines_of, short
from relight.training.collectives.policy import CodeBetween, NoCodeBetween
from relight.training.connection.page import PositionPage
from relight.training.process.controller.notices import Notices
from relight.training.process.groups import ProcessGroups
from relight.training.process.holdings import Holdings, NoHoldings
from relight.training.torch_private.autograd import not_compiled


class Protection:
    """The answers that process groups need for each operation (`CollectivePolicy`)."""

    def __init__(
        self,
        worker: Worker,
        page: PositionPage,
        groups: ProcessGroups,
        notices: Notices,
        await_stop: Callable[[str], bool],
    ) -> None:
        """`await_stop` reports that a collective broke, and waits for Stop; it returns False if none comes."""
        self._worker = worker
        self._page = page
        self._groups = groups
        self._notices = notices
        self._await_stop = await_stop
        self.holdings: Holdings = NoHoldings()  # of `Training`, once it is made
        self.code_between: CodeBetween = NoCodeBetween()  # the same
        self.started = False  # the first step was offered; before that nothing is protected
        self.in_step = False  # inside `with step`
        self.count_collective: Callable[[], None] = page.count_collective
        # A recovery has ended at the end of a block: a replacement does not run the code that follows it.
        self.after_recovery = False
        self.cut_collectives = 0
        # Operations that the script launched, buckets of DDP included, and sends and receives that it began to wait
        # for. To wait for a collective counts for nothing: `await_launched` has done so before the write.
        self.launches = 0
        self.launches_of_all = 0  # of these, the ones in which every rank takes part
        self._gathering = False
        self._interrupt: Any = None
        os.register_at_fork(after_in_child=self._leave_forked)

    def _leave_forked(self) -> None:
        """A process that was forked, such as a DataLoader's worker, takes no step: nothing in it is interrupted."""
        self.started = self.in_step = False

    @property
    def rank(self) -> int:
        """The rank that this process holds."""
        return self._worker.rank

    @property
    def closed(self) -> bool:
        """True if Stop has arrived: nothing of this generation may continue."""
        return self._worker.closed

    def is_protected(self) -> bool:
        """Return whether a failure here can be undone: inside a step, before its write."""
        return not self.started or (self.in_step and self._page.phase is not Phase.OPTIMIZER)

    def waited(self, nanoseconds: int) -> None:
        """A wait for an operation took so long."""
        self._page.waited(nanoseconds)

    def runs_other_modules(self) -> None:
        """Ranks run different modules, so the number of their collectives says nothing about which rank is late."""
        self._groups.waits.show_on(self._page)
        self.count_collective = self._page.note_operation

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Collectives in here follow the write, and are repeated after a recovery: nothing is lost if one is cut."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False

    # --- what a failure breaks ----------------------------------------------------------------------------------------
    def await_verdict(self, summary: str = "the connection to a peer was lost") -> bool:
        """A collective broke: wait for the Stop that explains it. False if the group is sound and none comes."""
        return self.closed or (self._groups.is_broken and self._await_stop(summary))

    def cut(self, operation: str) -> None:
        """An operation that cannot be repeated was cut short by a recovery; its result is this rank's own."""
        if self._gathering or (operation == "barrier" and not self.in_step):  # that has no result
            return
        worker, notices = self._worker, self._notices
        self.cut_collectives += 1
        where = "after the write" if self.in_step else "between two steps"
        if self.in_step:
            at = "".join(f" at {short(file)}:{line}" for file, line in lines_of(sys._getframe())[:1])
            worker.handle(CutShort(f"in step {worker.version} {operation} came after the write{at}, and was cut short"))
        else:
            worker.handle(WentOnAlone())
        text = (
            f"{operation} {where} was cut short by a recovery; its result is this rank's own value. Put collectives "
            "inside `with step`, before optimizer.step(), where they are repeated"
        )
        if worker.torn:  # what was written is thrown away
            notices.say("cut", f"rank {self.rank}: {text}")
        else:
            notices.doubt(text)

    def unprotected(self, operation: str) -> None:
        """An operation was launched where a recovery could not repeat it."""
        if self.rank != 0 or self._worker.is_standby or self._gathering or self.code_between.may_wait:
            return
        if self.in_step and self.holdings.is_optimizer_at_work():
            self._notices.say(
                "communicating optimizer",
                f"the optimizer calls {operation} in its step, after the first write, where a recovery cannot repeat "
                "it: should a failure strike just there, what was written is worth nothing on any rank, and the job "
                "ends, or goes back to buddy memory or a checkpoint. Have it communicate before optimizer.step(), or "
                "take one that needs no other rank",
            )
        else:
            where = "after optimizer.step()" if self.in_step else "between two steps"
            self._notices.say(
                "unprotected",
                f"the script calls {operation} {where}, where a recovery cannot repeat it: should a failure strike "
                "just there, each rank keeps its own value. Move it inside `with step`, before optimizer.step()",
            )

    # --- forward passes -----------------------------------------------------------------------------------------------
    def stop_forwards(self) -> None:
        """Have forward passes end early, from any thread. Hooked only now: an undisturbed pass pays nothing for it."""
        if self._interrupt is None:
            self._interrupt = torch_module.register_module_forward_pre_hook(self._interrupt_forward)

    def let_forwards_run(self) -> None:
        """A generation is opened."""
        if self._interrupt is not None:
            self._interrupt.remove()
            self._interrupt = None

    @not_compiled
    def _interrupt_forward(self, module: torch.nn.Module, arguments: Any) -> None:  # noqa: ARG002
        if not self.started:  # a replacement that builds its modules after it was given its rank
            return
        if self.closed and self.is_protected() and threading.current_thread() is threading.main_thread():
            raise StepInterrupted("the generation was closed by a failure elsewhere")
