"""Reports of this process to people: notices, and doubts about the bits."""

from relight.core.protocol.events import BitsDoubted, WorkerNotice
from relight.core.worker.worker import Worker
from relight.training.connection.link import AgentLink
from relight.training.process.faults import Faults


class Notices:
    """Says each thing once."""

    def __init__(self, link: AgentLink, process: str, worker: Worker, faults: Faults) -> None:
        """`faults` knows the step that people see."""
        self._link = link
        self._process = process
        self._worker = worker
        self._faults = faults
        self.said: dict[str, str] = {}  # texts by key
        self._went_back_to = -1  # the version of the newest recovery
        self.doubts: dict[str, BitsDoubted] = {}  # by reason
        self.doubts_of_job: tuple[str, ...] = ()  # those of all ranks, as of the newest recovery
        self._risk = (-1, "")  # the newest step after which a recovery makes this a doubt

    def say(self, key: str, text: str) -> None:
        """Tell the user once."""
        if key not in self.said:
            self.said[key] = text
            self._link.send(WorkerNotice(process=self._process, rank=self._worker.rank, text=text))

    def doubt(self, reason: str, step: int | None = None) -> None:
        """Report, once for each reason, that the bits may not be those of an undisturbed run from this step on.

        To be called where a failure has struck, and on every rank that knows of it: one may be lost.
        """
        if reason in self.doubts:
            return
        step = max(0, self._faults.step if step is None else step)
        doubt = BitsDoubted(process=self._process, rank=self._worker.rank, step=step, reason=reason)
        self.doubts[reason] = doubt
        self._link.send(doubt)

    def doubt_if_lost_after(self, step: int, reason: str) -> None:
        """Doubt, if a recovery goes back to where this step has just ended, or before that, or has just done so."""
        self._risk = step, reason
        if self._went_back_to == step + 1:
            self.doubt(reason)

    def note_recovery(self, version: int, standing_risk: str) -> None:
        """All ranks resume from `version`. `standing_risk`: why any recovery makes the bits doubtful, if it does."""
        self._went_back_to = version
        if standing_risk:
            self.doubt(standing_risk)
        step, reason = self._risk
        if step >= version - 1 >= 0:
            self.doubt(reason)

    def repeat_doubts(self) -> None:
        """Send all doubts again: an agent that died may not have passed them on."""
        for doubt in list(self.doubts.values()):
            self._link.send(doubt)
