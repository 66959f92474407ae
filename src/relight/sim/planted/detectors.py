"""Other detectors: each blames a process, or none, where the production one does not."""

from collections.abc import Mapping

from relight.core.detection.detector import STALE_SECONDS, Detector, DetectorSettings
from relight.core.protocol import events as ev
from relight.core.protocol.position import IN_STEP, Phase


class BlamesWhoStopsLater(Detector):
    """A defect of an earlier version: a survivor that had long waited for a hung rank was blamed if another one stopped
    sooner.
    """

    def _update(self, sample: object, now: float) -> None:
        super()._update(sample, now)  # type: ignore[arg-type]
        for watch in self._watched.values():
            watch.before_ns = watch.ahead_ns = 0


class TakesFinishingForTraining(Detector):
    """A defect of an earlier version: a rank that finished its step by itself was taken for a sign that all had been
    told to go on.
    """

    def _peers_train(self, watch: object, ranks: Mapping[int, object]) -> bool:
        if super()._peers_train(watch, ranks):  # type: ignore[arg-type]
            return True
        mine = watch.position  # type: ignore[attr-defined]
        return any(
            peer.position.phase in IN_STEP  # type: ignore[attr-defined]
            and peer.position.generation == mine.generation  # type: ignore[attr-defined]
            and peer.position.stamp_ns > mine.stamp_ns  # type: ignore[attr-defined]
            for peer in ranks.values()
        )


class DoesNotCountTheDone(Detector):
    """A defect of an earlier version: a rank that hung just after Resume was waited for forever if the others were
    done with training.
    """

    def _peers_train(self, watch: object, ranks: Mapping[int, object]) -> bool:
        working = {rank: peer for rank, peer in ranks.items() if peer.position.phase is not Phase.DONE}  # type: ignore[attr-defined]
        return super()._peers_train(watch, working)  # type: ignore[arg-type]


class ForgetsThoseWhoAreAllParked(Detector):
    """A defect of an earlier version: if all ranks hung just after Resume, no rank was behind another, and nothing
    happened any more.
    """

    def _parked(self, ranks: Mapping[int, object]) -> list[ev.Event]:  # noqa: ARG002
        return []


class BlamesTheBereft(Detector):
    """A defect of an earlier version: when a host was given up, a rank that had long waited for it was blamed unless it
    stopped at once.
    """

    def _excuse_the_bereft(self, members: frozenset[str], ranks: Mapping[int, object], now: float) -> None:
        pass


class ComparesWithWhoIsOutOfSight(Detector):
    """A defect of an earlier version: if hangs were noticed in 10 s or less, a survivor was blamed for waiting for a
    lost host.
    """

    def __init__(self, settings: DetectorSettings) -> None:
        super().__init__(settings)
        self._stale_seconds = STALE_SECONDS

    def expect(self, sample_seconds: float) -> None:
        super().expect(sample_seconds)
        self._stale_seconds = STALE_SECONDS + 2 * sample_seconds


class ComparesThoughSeldomHeard(Detector):
    """A defect of an earlier version: with many agents, each heard seldom, a survivor was blamed for waiting for a lost
    host.
    """

    def expect(self, sample_seconds: float) -> None:
        super().expect(sample_seconds)
        self._hang_seconds = self._settings.hang_timeout_seconds
        self._stale_seconds = self._hang_seconds / 2 + 2 * sample_seconds


class TakesSlowSamplingForBlindness(Detector):
    """With many agents each is heard seldom: then everybody is out of sight, and no hang is ever noticed."""

    def expect(self, sample_seconds: float) -> None:
        pass


class BlamesByAnOldSample(Detector):
    """A defect of an earlier version: with many agents, a rank was blamed by a sample from when it had waited for the
    others.
    """

    def _note_since_when(self, ranks: Mapping[int, object], last: frozenset[int]) -> None:
        super()._note_since_when(ranks, last)  # type: ignore[arg-type]
        for rank in last:
            watch = ranks[rank]
            if watch.behind_since_ns == watch.ahead_ns:  # type: ignore[attr-defined]
                watch.behind_since_ns = max(watch.since_ns, watch.before_ns)  # type: ignore[attr-defined]
