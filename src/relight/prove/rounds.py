"""Runs the attempts of a proof one after another, each as a job of its own, and compares what they wrote down."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from relight.core.account.report import JobReport
from relight.core.account.verdict import describe_doubts
from relight.core.protocol.events import FaultStruck
from relight.core.protocol.fault import Fault, Plan
from relight.prove.attempt import run_attempt
from relight.prove.compare import Attempt, Difference, collect, compared, first_difference, first_divergence
from relight.prove.names import Uses, uses_of
from relight.prove.result import Proof, RoundResult, describe_faults, verdict_of
from relight.server.records.journal import read_journal
from relight.wire.records.evidence import read_evidence
from relight.wire.settings import JobSettings
from relight.words import count

Tell = Callable[[str], None]


class Prover:
    """One proof. `tell` takes lines for people, `show` the line that is renewed while an attempt runs."""

    def __init__(self, settings: JobSettings, base: Path, steps: int, tell: Tell, show: Tell) -> None:
        self._settings = settings
        self._base = base
        self._steps = steps
        self._tell = tell
        self._show = show

    def prove(self, plans: list[tuple[Fault, ...]], seed: int) -> Proof:
        """All rounds; stops at the first one that differs, since more would only say it again."""
        settings, ranks = self._settings, self._settings.world_size
        proof = Proof(
            script=settings.script,
            ranks=ranks,
            steps=self._steps,
            seed=seed,
            run_dir=str(self._base),
            verdict="",
        )
        self._tell(f"undisturbed: {self._steps} steps of {settings.script} on {ranks} ranks")
        report, seconds = self._run("undisturbed", ())
        if report.error:
            return msgspec.structs.replace(proof, error=report.error, verdict=verdict_of(report.error, ()))
        before = collect(read_evidence(self._base / "undisturbed"))
        steps = min(self._steps, report.steps)
        self._tell(f"undisturbed: {steps} steps in {seconds:.0f} s; {count(len(plans), 'round')} with failures to come")
        rounds: list[RoundResult] = []
        for number, faults in enumerate(plans, 1):
            rounds.append(self._round(number, faults, before, steps))
            if rounds[-1].difference is not None:
                break
        return msgspec.structs.replace(
            proof,
            steps=steps,
            seconds=round(seconds, 3),
            rounds=tuple(rounds),
            verdict=verdict_of("", tuple(rounds)),
            names=self._names(rounds),
        )

    def _round(self, number: int, faults: tuple[Fault, ...], before: Attempt, steps: int) -> RoundResult:
        name, sentences = f"round-{number}", describe_faults(faults)
        self._tell(f"round {number}: {'; '.join(sentences)}")
        report, seconds = self._run(name, faults)
        now, ranks = collect(read_evidence(self._base / name)), self._settings.world_size
        difference = first_difference(before, now, report, steps, ranks)
        if difference is not None and difference.recovery:
            difference = self._trace(name, faults, difference)
        done = RoundResult(
            number=number,
            run_dir=str(self._base / name),
            seconds=round(seconds, 3),
            faults=sentences,
            struck=self._struck(name),
            recoveries=len(report.recoveries),
            steps_compared=compared(before, now, steps, ranks),
            error=report.error,
            doubts=describe_doubts(report.doubts),
            difference=difference,
        )
        said = f"differs from step {difference.step} on" if difference else "the same bits"
        if report.error:
            said = f"ended with an error; until then {said}"
        self._tell(
            f"round {number}: {done.struck} failures struck, {done.recoveries} recoveries, {seconds:.0f} s: {said}"
        )
        return done

    def _trace(self, name: str, faults: tuple[Fault, ...], difference: Difference) -> Difference:
        """Both attempts once more, up to the step that differs, with each of its operations written down."""
        step = difference.step
        self._tell(f"{name}: looking for the line: step {step} once more with and without failures")
        found = []
        for attempt, planned in (("undisturbed", ()), (name, faults)):
            self._run(f"{attempt}-traced", planned, traced_step=step)
            found.append(collect(read_evidence(self._base / f"{attempt}-traced")))
        divergences = []
        for rank in range(self._settings.world_size):
            a, b = found[0].get((step, rank)), found[1].get((step, rank))
            if a is not None and b is not None:
                divergences.append(first_divergence(rank, a.operations, b.operations))
        return msgspec.structs.replace(difference, divergences=tuple(filter(None, divergences)))

    def _names(self, rounds: list[RoundResult]) -> dict[str, Uses]:
        names = {
            change.name
            for each in rounds
            if each.difference is not None
            for rank in each.difference.ranks
            for change in rank.names
        }
        if not names or self._settings.module or self._settings.no_python:
            return {}
        try:
            return uses_of(Path(self._settings.script).read_text(), sorted(names))
        except (OSError, UnicodeDecodeError):
            return {}

    def _struck(self, name: str) -> int:
        try:
            _, lines = read_journal(self._base / name / "journal.jsonl")
        except (OSError, msgspec.MsgspecError):
            return 0
        return sum(isinstance(line.event, FaultStruck) for line in lines)

    # --- one attempt ----------------------------------------------------------------------------------------------
    def _run(self, name: str, faults: tuple[Fault, ...], traced_step: int = -1) -> tuple[JobReport, float]:
        """Returns its report and how long it took. Raises KeyboardInterrupt once its job has ended, if asked to."""
        run_dir = self._base / name
        run_dir.mkdir()
        steps = self._steps if traced_step < 0 else traced_step + 1
        settings = msgspec.structs.replace(
            self._settings,
            job=f"{self._base.name}-{name}",
            run_id=uuid.uuid4().hex[:8],
            run_dir=str(run_dir),
            plan=Plan(faults=faults, world_size=self._settings.world_size),
            stop_after=steps,
            evidence=True,
            traced_step=traced_step,
        )
        started = time.monotonic()
        report = run_attempt(
            settings,
            lambda: self._show(f"{name}: step {_newest_step(run_dir)} of {steps}, {time.monotonic() - started:.0f} s"),
        )
        self._show("")
        return report, time.monotonic() - started


def _newest_step(run_dir: Path) -> int:
    """Lines of the longest file: steps that one process has committed, or somewhat less."""
    sizes = [path.read_bytes().count(b"\n") for path in (run_dir / "evidence").glob("*.jsonl")]
    return max(sizes, default=0)
