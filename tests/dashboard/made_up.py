"""A run directory as a job would have written it: any number of ranks, hours of history, failures where asked for.

The journal is what a real controller is told, in the order in which it could have happened; the trace is what agents
would have sent. Both can be written at once, or piece by piece while a reader follows.
"""

import datetime
from collections.abc import Iterator
from pathlib import Path

import msgspec

from relight.core.controller import Controller, ControllerSettings
from relight.core.protocol.events import (
    AgentJoined,
    Event,
    ProcessExited,
    ProcessStarted,
    Restored,
    RestoreProgress,
    StandbyReady,
    StepResumed,
    Stopped,
    TrainingEntered,
)
from relight.core.protocol.position import Phase, Position
from relight.server.records.journal import JournalHeader, JournalLine
from relight.timeline.model.spans import Chunk, Record
from relight.wire.settings import JobSettings
from relight.wire.status import Status, StatusLine

NS = 10**9
MONOTONIC_NS = 5 * NS  # the host's monotonic clock at the job's start
BEGUN_SECONDS = 2.0  # first step of all ranks
SHARES = (
    (Phase.FORWARD, 0.0),
    (Phase.BACKWARD, 0.36),
    (Phase.BARRIER, 0.86),
    (Phase.OPTIMIZER, 0.89),
    (Phase.OUTSIDE, 0.97),
)


class MadeUpJob:
    """Writes `journal.jsonl` and `trace.jsonl` of a job that started at `wall` (Unix seconds)."""

    def __init__(
        self,
        run_dir: Path,
        *,
        ranks: int,
        wall: float,
        step_seconds: float = 0.1,
        standbys: int = 1,
        until: int = 100_000,
        job: str = "made-up",
        agent: str = "node-0",
        parts: tuple[str, ...] = (),
    ) -> None:
        """`parts`: the part of the state that each rank holds, if it is divided."""
        self._parts = parts
        run_dir.mkdir(parents=True, exist_ok=True)
        self.ranks, self.wall, self.step_seconds, self.until, self.agent = ranks, wall, step_seconds, until, agent
        self._journal = run_dir / "journal.jsonl"
        self._trace = run_dir / "trace.jsonl"
        self._status = run_dir / "status.jsonl"
        self.settings = JobSettings(
            job=job, script="train.py", world_size=ranks, standbys=standbys, run_dir=str(run_dir)
        )
        names = ControllerSettings.__struct_fields__
        self.core = Controller(ControllerSettings(**{name: getattr(self.settings, name) for name in names}))
        self.holders: dict[int, str] = {}
        self.step = 0
        self.generation = 1
        self.at = BEGUN_SECONDS  # when the next step begins, in seconds since the start
        self._journal.write_bytes(
            msgspec.json.encode(JournalHeader(format=1, wall=self._iso(0.0), settings=self.settings)) + b"\n"
        )
        self._trace.touch()
        self._begin()

    def _iso(self, now: float) -> str:
        return datetime.datetime.fromtimestamp(self.wall + now, datetime.UTC).isoformat(timespec="microseconds")

    def tell(self, now: float, *events: Event) -> None:
        """Put events into the journal, with the orders that a controller gives for them."""
        lines: list[JournalLine] = []
        for event in events:
            lines.append(JournalLine(now=now, wall=self._iso(now), event=event))
            lines += [JournalLine(now=now, command=command) for command in self.core.handle(event, now)]
        with self._journal.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def say(self, now: float, *statuses: Status) -> None:
        """Add reports of workers besides phases."""
        with self._status.open("ab") as file:
            lines = (msgspec.json.encode(StatusLine(now=now, status=status)) for status in statuses)
            file.writelines(line + b"\n" for line in lines)

    def note(self, now: float, text: str) -> None:
        with self._journal.open("ab") as file:
            file.write(msgspec.json.encode(JournalLine(now=now, wall=self._iso(now), note=text)) + b"\n")

    def _begin(self) -> None:
        self.tell(0.0, AgentJoined(agent=self.agent, slots=self.ranks))
        names = list(self.core.members.processes)
        self.tell(0.1, *(ProcessStarted(process=name, pid=0) for name in names))
        self.holders = dict(self.core.rank_processes())
        starting = {rank: [self._record(0.2, 0, 0, Phase.STARTING, 0)] for rank in self.holders}
        self.trace(starting)
        self.tell(
            1.0, *(StandbyReady(process=name, layout_digest="l") for name in names if name not in self.holders.values())
        )
        self.tell(
            1.5,
            *(
                TrainingEntered(
                    process=name,
                    rank=rank,
                    version=0,
                    layout_digest="l",
                    state_digest="s",
                    until=self.until,
                    shard=self._parts[rank] if self._parts else "",
                )
                for rank, name in self.holders.items()
            ),
        )

    def _record(self, at: float, generation: int, step: int, phase: Phase, version: int) -> Record:
        return (MONOTONIC_NS + round(at * NS), generation, step, int(phase), version)

    def trace(self, records: dict[int, list[Record]]) -> None:
        """Write a chunk for each of these ranks."""
        offset = round(self.wall * NS) - MONOTONIC_NS
        with self._trace.open("ab") as file:
            for rank, found in records.items():
                chunk = Chunk(self.holders[rank], rank, tuple(found), offset)
                file.write(msgspec.json.encode(chunk) + b"\n")

    def steps(self, count: int, *, slow: dict[int, float] | None = None, chunk_steps: int = 10) -> None:
        """Let all ranks take so many steps; `slow`: how many times longer the forward of some ranks takes."""
        done = 0
        while done < count:
            several = min(chunk_steps, count - done)
            self.trace({rank: list(self._steps(rank, several, (slow or {}).get(rank, 1.0))) for rank in self.holders})
            self.step += several
            self.at += several * self.step_seconds
            done += several

    def _steps(self, rank: int, count: int, slowness: float) -> Iterator[Record]:
        for index in range(count):
            step, begin = self.step + index, self.at + index * self.step_seconds
            jitter = 0.01 * ((rank * 7 + step * 13) % 5)
            for phase, share in SHARES:
                moved = share * (slowness if phase is Phase.BACKWARD else 1.0) + (
                    jitter if phase in (Phase.BACKWARD, Phase.BARRIER) else 0.0
                )
                version = step + (phase is Phase.OUTSIDE)
                yield self._record(begin + moved * self.step_seconds, self.generation, step, phase, version)

    def fail(self, rank: int, *, evidence: str = "was killed by SIGKILL", recovery_seconds: float = 0.3) -> None:
        """A rank dies in backward; a standby takes it over, and everyone takes the step again."""
        self.die(rank, evidence=evidence)
        self.recover(recovery_seconds=recovery_seconds)

    def die(self, rank: int, *, evidence: str = "was killed by SIGKILL", noticed_after: float = 0.002) -> None:
        """The first half of `fail`."""
        struck = self.at + 0.5 * self.step_seconds
        last = {
            each: [
                self._record(self.at, self.generation, self.step, Phase.FORWARD, self.step),
                self._record(self.at + 0.36 * self.step_seconds, self.generation, self.step, Phase.BACKWARD, self.step),
            ]
            for each in self.holders
        }
        self.trace(last)
        position = Position(
            generation=self.generation,
            rank=rank,
            step=self.step,
            phase=Phase.BACKWARD,
            version=self.step,
            stamp_ns=MONOTONIC_NS + round((self.at + 0.36 * self.step_seconds) * NS),
            fault_ns=MONOTONIC_NS + round(struck * NS),
            private_versions=(self.step, self.step - 1),
        )
        now = struck + noticed_after
        self.tell(
            now,
            ProcessExited(
                process=self.holders[rank],
                exit_status=-9,
                evidence=evidence,
                position=position,
                noticed_ns=MONOTONIC_NS + round(now * NS),
            ),
        )
        self.at = now

    def recover(self, *, recovery_seconds: float = 0.3) -> None:
        """The second half of `fail`: needs a warm standby."""
        resumed = self.at + recovery_seconds
        self.stop()
        self.restore(resumed)

    def stop(self) -> None:
        """Every rank is paused, and has a process."""
        holders = dict(self.core.rank_processes())
        blank = {rank for rank, name in holders.items() if self.holders[rank] != name}
        self.holders = holders
        self.generation = self.core.generation
        stopped = self.at = self.at + 0.02
        version = self.step
        self.trace(
            {each: [self._record(stopped, self.generation, self.step, Phase.PARKED, version)] for each in self.holders}
        )
        self.tell(
            stopped,
            *(
                Stopped(
                    process=name,
                    rank=each,
                    generation=self.generation,
                    step=-1 if each in blank else self.step,
                    version=0 if each in blank else version,
                    lineage="" if each in blank else f"lineage {version}",
                    prepared=-1,
                    torn=False,
                    blank=each in blank,
                    stop_seconds=0.01,
                    restore_address="/tmp/none",
                )
                for each, name in self.holders.items()
            ),
        )

    def restore(self, resumed: float | None = None) -> None:
        """Every rank holds the state again, at `resumed`, and takes the step again."""
        resumed = self.at + 0.28 if resumed is None else resumed
        version = self.step
        progress = RestoreProgress(reform_seconds=0.05, copy_seconds=0.1, copied_bytes=2**20, digest_seconds=0.01)
        self.tell(
            resumed,
            *(
                Restored(
                    process=name,
                    rank=each,
                    generation=self.generation,
                    version=version,
                    lineage=f"lineage {version}",
                    state_digest="s",
                    layout_digest="l",
                    progress=progress,
                )
                for each, name in self.holders.items()
            ),
        )
        self.at = resumed
        self.steps(1)
        begun, done = (MONOTONIC_NS + round(at * NS) for at in (resumed, self.at))
        self.tell(
            self.at,
            *(
                StepResumed(
                    process=name,
                    rank=each,
                    generation=self.generation,
                    step=self.step - 1,
                    resumed_ns=begun,
                    forward_ns=begun,
                    commit_ns=done,
                )
                for each, name in self.holders.items()
            ),
        )
        new = [name for name, p in self.core.members.processes.items() if p.alive and not p.started]
        self.tell(self.at, *(ProcessStarted(process=name, pid=0) for name in new))
        self.tell(self.at + 0.001, *(StandbyReady(process=name, layout_digest="l") for name in new))
