"""A job on the emulated nodes of a real Slurm, submitted with `relight submit slurm`."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from relight.core.account.report import JobReport, decode_report
from tests.clusters.slurm import ENDS, NODES, Slurm
from tests.survival.harness import DEADLINE_SECONDS, PROGRAMS, Outcome, Training


class SlurmJob:
    """One job, submitted with `relight submit slurm`."""

    def __init__(
        self, slurm: Slurm, directory: Path, training: Training, *options: str, flags: Sequence[str] = ()
    ) -> None:
        """`options`: of `relight submit slurm`. `flags`: of `relight run`."""
        self._slurm = slurm
        self.directory = directory
        self._final, self._hold = directory / "final", directory / "go"
        directory.mkdir(parents=True, exist_ok=True)
        token = directory / "token"
        token.write_text("a secret of this test's nodes")
        token.chmod(0o600)
        run = (
            *("--nproc-per-node", str(training.ranks // 3), "--oversubscribe", "--preload", "torch"),
            *("--agent-timeout-seconds", "4", "--hang-timeout-seconds", "30", *flags),
            *(str(PROGRAMS / training.program), "--steps", str(training.steps), *training.arguments),
            *("--save", str(self._final), "--hold", str(self._hold)),
        )
        self.script = subprocess.run(
            [
                *(sys.executable, "-m", "relight", "submit", "slurm", "--nodes", "4", "--spare-nodes", "1", *options),
                *(f"--option=--output={directory}/out", "--", *run),
            ],
            check=True,
            capture_output=True,
            text=True,
            cwd=directory,
        ).stdout
        said = slurm.ask("sbatch", "--parsable", stdin=self.script, directory=directory, RELIGHT_TOKEN_FILE=str(token))
        self.number = said.strip()
        self.run_dir = directory / "runs" / self.number

    def output(self) -> str:
        """All that relight and the workers have printed."""
        path = self.directory / "out"
        return path.read_text(errors="replace") if path.exists() else ""

    def journal(self) -> str:
        """The journal so far."""
        path = self.run_dir / "journal.jsonl"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> float:
        """As of the cluster; the job must not end before."""

        def holds() -> bool:
            state = self._slurm.job_state(self.number)
            assert condition() or state not in ENDS, f"{state} before {what}\n{self.describe()}"
            return condition()

        try:
            return self._slurm.wait_until(holds, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def until_it_trains(self) -> None:
        """Wait for the third step and the warm standby."""
        self.wait_until(lambda: "committed 3" in self.output(), "training has begun")
        self.wait_until(lambda: '"StandbyReady"' in self.journal(), "the standby is warm")

    def release(self) -> None:
        """Let the program go on that waits because of --hold-at, and without pauses."""
        self._hold.touch()

    def wait(self) -> Outcome:
        """Wait for the end of the job; nothing of it may be left on any node that is there."""
        slurm = self._slurm
        try:
            slurm.wait_until(lambda: slurm.job_state(self.number) in ENDS, "the job ends")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None
        report = self.run_dir / "report.json"
        saved = {path.suffix[1:]: json.loads(path.read_text()) for path in self.directory.glob("final.*")}
        return Outcome(
            command=("slurm",),
            status=0 if slurm.job_state(self.number) == "COMPLETED" else 1,
            stdout=self.output(),
            stderr="",
            run_dir=self.run_dir,
            seconds=0.0,
            report=decode_report(report.read_bytes()) if report.exists() else JobReport(job="", error="no report"),
            finals={int(rank): saved[rank] for rank in sorted(saved) if rank.isdecimal()},
        )

    def check_nothing_is_left(self, *lost: str) -> None:
        """Neither a job in the queue nor a process on a node, but for those that were lost."""
        nodes = [node for node in NODES if node not in lost]
        try:
            self._slurm.wait_until(lambda: not self._slurm.queue(), "no job is left", 60.0)
            self._slurm.wait_until(lambda: not any(map(self._slurm.left_on, nodes)), "no process is left", 30.0)
        except AssertionError as error:
            left = {node: self._slurm.left_on(node) for node in nodes}
            raise AssertionError(f"{error}: {self._slurm.queue()}\n{left}\n{self.describe()}") from None

    def describe(self) -> str:
        """Everything that helps to understand a job that went wrong."""
        logs = "".join(path.read_text(errors="replace")[-1500:] for path in self.run_dir.glob("logs/ordered-*.out"))
        slurm = self._slurm
        return (
            f"{slurm.states()}\n{slurm.queue()}\n{self.output()[-5000:]}\n{logs}\n{self.journal()[-1500:]}\n"
            f"{slurm.complaints()}"
        )
