"""Judges a simulated job while it runs: the invariants of docs/PROTOCOL.md, at the moment they could first be broken.

The checker sees what no controller can: the true state of every process, dead ones included. What is right is
computed beforehand, from a run that nothing disturbs; the content of every version and every rank's private state
must equal it, so a wrong bit shows where it arises and not at the end. What can be said of a journal alone, also of
a real one, is in journal.py.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import product

from relight.core.account.report import JobReport
from relight.core.protocol import commands as cmd
from relight.core.protocol.events import AgentLost, Restored
from relight.core.protocol.fault import Action
from relight.sim.judge.ends import check_end
from relight.sim.judge.placement import Placement
from relight.sim.judge.restores import check_restore
from relight.sim.judge.supply import Supply
from relight.sim.judge.wrong_bits import WrongBits
from relight.sim.model.contents import State, Violation, part_key, reference
from relight.sim.model.fallback_tiers import Saved
from relight.sim.model.shapes import ONE_WRITE, Pattern
from relight.sim.model.worker.worker import SimulatedWorker

# Why a healthy process may be killed.
_HARMLESS_KILLS = (
    "starting all ranks again",
    "no longer needed",
    "training finished",
    "said again",
    "again: it was declared failed",
    "its host is drained",
    "is drained: ",
)


def _heard(worker: SimulatedWorker) -> int:
    """The newest generation that undid versions, as far as this process knows."""
    return worker.machine.history if worker.lower is not None else 0


class Checker:
    """Is called for everything as it happens; raises Violation."""

    def __init__(
        self, world_size: int, until: int, workers: Mapping[str, SimulatedWorker], pattern: Pattern = ONE_WRITE
    ) -> None:
        self.workers = workers
        self.world_size = world_size
        self.until = self.asked = until  # the version with which the job ends, and the one that it was started for
        self.pattern = pattern
        right = reference(world_size, until, pattern)
        self.states, self.privates = right.states, right.privates
        self.wrong = WrongBits(right, pattern)
        self.finished = 0  # newest version that anyone, dead or alive, ever finished
        self.begun = 0  # newest step that anyone began
        self.shown = 0  # newest version that engines answer with
        self.fallbacks: tuple[tuple[int, int], ...] = ()  # generation and target of each time that versions were undone
        self.falling_back = False  # the last of them is not finished
        self.followers: frozenset[int] = frozenset()  # ranks that are to copy though they hold something
        self.kept: tuple[int, tuple[tuple[str, ...], ...]] = (-1, ())  # a version, and by rank its snapshots' holders
        self.generation = 1
        self.standing: cmd.Command | None = None  # the newest order to all
        self.faults: tuple[tuple[Action, str, str], ...] = ()  # what, process, point
        self.disturbed: set[str] = set()  # kinds of faults that are not of one process
        self.parts = 1  # that the state is divided into
        self.verify_every = 0  # steps from one comparison of states to the next
        self.copied_wrong = False  # from a rank whose bits had flipped, when no other held that part
        self.derivable = False  # private state follows from rank and step: it cannot be lost
        self.fenced: set[str] = set()  # processes of hosts that were given up; they may live on
        self.placement, self.supply = Placement(), Supply()
        self.host_of: Mapping[str, str] = {}  # of each process

    def copy(self, workers: Mapping[str, SimulatedWorker]) -> "Checker":
        """A copy that judges copies of the workers."""
        twin = Checker.__new__(Checker)
        twin.__dict__.update(self.__dict__)
        twin.workers = workers
        twin.wrong = self.wrong.copy()
        return twin

    def key(self) -> Hashable:
        """The facts that later verdicts depend on."""
        struck = tuple([(action, name) for action, name, _ in self.faults])
        return self.finished, self.begun, self.shown, self.generation, self.wrong.doubted, struck

    def key_of_all(self) -> Hashable:
        """The part of the key that is not about one rank."""
        return self.finished, self.begun, self.shown, self.generation, self.wrong.doubted

    def struck_late(self) -> set[int]:
        """Ranks of which a fault struck a process that had done its last step: that excuses a late failure."""
        workers = [self.workers[name] for _, name, _ in self.faults]
        return {worker.rank for worker in workers if worker.state.version == self.until}

    # --- what happens -------------------------------------------------------------------------------------------
    def struck(self, action: Action, worker: SimulatedWorker) -> None:
        """A fault is about to strike."""
        self.faults += ((action, worker.name, worker.point),)

    def lost_host(self, event: AgentLost) -> None:
        """The controller is about to hear that this host is gone."""
        self.disturbed.add("host lost")
        self.placement.hear(event)

    def doubts(self, worker: SimulatedWorker) -> None:
        self.wrong.doubts(worker.rank, is_disturbed=bool(self.faults or self.disturbed))

    def began_step(self, worker: SimulatedWorker) -> None:
        """I2, I3, I7: the right state at the right place, and nothing finished is done again."""
        step = worker.state.version
        self.check_content(worker, "computes with")
        if worker.machine.attempt and self.disturbed == {"drain"} and not self.faults:
            raise Violation(f"I17: step {step} is repeated though hosts were only drained")
        if worker.name in self.fenced:
            return  # it does not know, and cannot end the step without the others
        if step < self.finished:
            raise Violation(f"I7: rank {worker.rank} repeats step {step} though version {self.finished} was finished")
        if step < self.begun:
            raise Violation(f"I2: more than the step in flight is repeated: {step} again, begun {self.begun}")
        self.begun = max(self.begun, step)

    def committed(self, worker: SimulatedWorker) -> None:
        """I1 and I6: one content per version; live versions are v, or v and v+1."""
        self.check_content(worker, "finished")
        if worker.page.read_private(worker.state.version) != worker.private:
            raise Violation(f"I3: beside the page of rank {worker.rank} is another private state than its own")
        is_undone = bool(self.fallbacks) and worker.machine.generation < self.fallbacks[-1][0]  # the others went back
        if not is_undone:
            self.finished = max(self.finished, worker.state.version)
        if worker.name in self.fenced:
            return  # what it finished, its successor must not undo: that I7 sees to
        if worker.state.content in self.wrong.flipped and worker.healthy and self._must_not_spread():
            raise Violation(
                f"I1: rank {worker.rank} applies what another rank computed from a state with a flipped bit"
            )
        versions = {w.state.version for w in self.members() if not w.machine.blank}
        if max(versions) - min(versions) > 1:
            raise Violation(f"I6: live versions are {sorted(versions)}")

    def overwrites(self, worker: SimulatedWorker) -> None:
        """I8: a copy goes only into a rank that holds nothing."""
        if not self.is_lost(worker) and worker.rank not in self.followers:
            raise Violation(f"I8: a copy over the intact state of rank {worker.rank} ({worker.name})")

    def established(self, version: int) -> None:
        """Some rank knows that every rank's snapshot of that version is with itself and with its buddy."""
        self.kept = version, tuple(self._holders_of(rank, version) for rank in range(self.world_size))

    def _holders_of(self, rank: int, version: int) -> tuple[str, ...]:
        """The rank itself and its buddy; what an earlier buddy has is of no more use."""
        living = [(w, w.lower) for w in self.workers.values() if w.alive]
        mine = [(w.name, lower) for w, lower in living if lower is not None and rank in (w.rank, lower.ward)]
        return tuple(name for name, lower in mine if lower.kept_of(rank, version) is not None)

    def keeps(self, worker: SimulatedWorker, snapshots: Iterable[Saved]) -> None:
        """I15: what a rank says that it holds, or goes back to, is of no version that was undone."""
        for (generation, target), saved in product(self.fallbacks, snapshots):
            version = saved.state.version
            if saved.history < generation <= _heard(worker) and target < version:
                what = f"a snapshot of version {version}, which was undone in generation {generation}"
                raise Violation(f"I15: rank {worker.rank} keeps {what}")

    def saves(self, piece: Saved, save: cmd.Save) -> None:
        """I1 and I3 of a last checkpoint."""
        version = piece.state.version
        if version != save.target or not self.is_right(piece.state):  # a flipped bit may go unnoticed until here
            raise Violation(f"I1: rank {piece.rank} writes {piece.state} into a checkpoint of version {save.target}")
        self.wrong.check_private(piece.rank, version, piece.private, "writes into a checkpoint")

    def reads(self, worker: SimulatedWorker, pieces: Mapping[int, Saved]) -> None:
        """I15: the pieces of a checkpoint are of one history, be it one that was undone."""
        if len({piece.history for piece in pieces.values()}) > 1:
            raise Violation(f"I15: rank {worker.rank} reads a checkpoint that is mixed from several histories")

    def published(self, worker: SimulatedWorker, version: int, content: int) -> None:
        """I11: engines answer with a version only if every rank holds it, and with one content."""
        if worker.name in self.fenced:
            return  # what engines on a host that is cut off see is not judged
        if version > self.until or (content != self.states[version].content and not self.wrong.is_known(content)):
            raise Violation(f"I11: {worker.name} publishes a version {version} of another content")
        if version < self.shown:
            raise Violation(f"I11: engines go back from version {self.shown} to {version}")
        behind = [w for w in self.members() if not w.machine.blank and w.state.version < version]
        if behind:
            ranks = sorted(w.rank for w in behind)
            raise Violation(f"I11: version {version} is published while ranks {ranks} do not hold it")
        self.shown = version

    def commanded(self, command: cmd.Command, members: Iterable[str]) -> None:
        """Called before the command is carried out."""
        if isinstance(command, cmd.Begin | cmd.Resume) and len(command.buddies) not in (0, self.world_size):
            raise Violation(
                f"I15: {len(command.buddies)} of {self.world_size} ranks are told who keeps their snapshots"
            )
        if command == self.standing or command.why.startswith("again: "):
            # Said again to an agent, or by a controller, that was restarted. Perhaps its predecessor never said it.
            self.falling_back = self.falling_back and not isinstance(command, cmd.Resume)
            return
        if isinstance(command, cmd.Begin | cmd.Stop | cmd.Restore | cmd.Resume | cmd.Save):
            self.standing = command
        match command:
            case cmd.Stop() | cmd.Begin():
                self._check_generation(command)
            case cmd.Spawn() | cmd.ReleaseHost():
                held = [w.name for w in self.members() if self.host_of.get(w.name) == command.agent]
                if fault := self.placement.fault(command, held):
                    raise Violation(fault)
            case cmd.Kill():
                self._check_kill(command)
            case cmd.Restore():
                self._check_current(command)
                check_restore(self, command, [self.workers[name] for name in members])
            case cmd.Save():
                if command.target < self.finished:
                    raise Violation(f"I7: {command.target} is saved last, though version {self.finished} was finished")
            case cmd.Resume():
                self.falling_back = False
                self._check_current(command)
                for name in members:
                    self.check_content(self.workers[name], "resumes with")
                self._check_alike([self.workers[name] for name in members])
            case cmd.Assign():
                self._check_current(command)

    def final(self, end: cmd.EndJob, report: JobReport) -> None:
        """The job has ended; was that its right end?"""
        check_end(self, end, report)

    # --- judgement ----------------------------------------------------------------------------------------------
    def members(self) -> list[SimulatedWorker]:
        return [w for w in self.workers.values() if w.alive and w.rank >= 0 and w.name not in self.fenced]

    def check_content(self, worker: SimulatedWorker, what: str) -> None:
        state = worker.state
        if worker.machine.blank or not self.is_right(state):
            raise Violation(f"I1: rank {worker.rank} ({worker.name}) {what} a wrong version {state.version}: {state}")
        self.wrong.check_private(worker.rank, state.version, worker.private, what)

    def is_right(self, state: State) -> bool:
        """True if a state is that of an undisturbed run. Bits that are wrong for a known reason are judged apart."""
        right = self.states[min(state.version, self.until)]
        known = self.wrong.is_known(state.content)
        return state == (right._replace(content=state.content) if known else right)

    def _must_not_spread(self) -> bool:
        """True if no rank may compute with results of a wrong rank, since states are compared in every step. A state
        that only one rank holds, or that all others have copied, cannot be compared; nor is the rest of a surprise."""
        compared = self.verify_every == 1 and not self.pattern.has_surprises
        return compared and self.world_size >= 2 * self.parts and not self.copied_wrong

    def _check_alike(self, members: Sequence[SimulatedWorker]) -> None:
        """I5: all say that they hold the same, each of its part."""
        flipped = {name for action, name, _ in self.faults if action is Action.FLIP_PARAMETER}
        self.copied_wrong |= any(w.state.content in self.wrong.flipped and w.name not in flipped for w in members)
        said: dict[str, str] = {}
        for worker in members:
            if isinstance(worker.last_report, Restored):
                digest = worker.last_report.state_digest
                if said.setdefault(part_key(worker.rank, self.parts), digest) != digest:
                    raise Violation(f"I5: rank {worker.rank} resumes though what it said to hold is not what others do")

    def _check_generation(self, command: cmd.Stop | cmd.Begin) -> None:
        """I10. Begin belongs to the generation that the ranks were started in."""
        first = isinstance(command, cmd.Begin) and command.generation >= self.generation
        if not first and command.generation <= self.generation:
            raise Violation(f"I10: generation {command.generation} after {self.generation}")
        self.generation = command.generation

    def _check_current(self, command: cmd.Assign | cmd.Restore | cmd.Resume) -> None:
        if command.generation < self.generation:
            raise Violation(f"I9: {type(command).__name__} of generation {command.generation} in {self.generation}")

    def _check_kill(self, kill: cmd.Kill) -> None:
        worker = self.workers.get(kill.process)
        if worker is None or not worker.healthy or any(text in kill.why for text in _HARMLESS_KILLS):
            return
        if worker.state.content in self.wrong.flipped:
            return  # it copied from a rank that was not known to be wrong yet
        if worker.machine.blank and "stop" not in kill.why:
            return  # it waits for a source that is frozen: one cannot tell them apart
        raise Violation(f"L3: {kill.process} is healthy, and is killed: {kill.why}")

    def is_lost(self, worker: SimulatedWorker) -> bool:
        """True if it holds nothing, or was interrupted in a surprise, or in a copy over a state of its own."""
        return worker.machine.blank or (worker.holds_nothing and (self.pattern.has_surprises or self.pattern.shares))

    def private_may_be_lost(self) -> bool:
        """With its page; or its page had none any more, because the rank was on its way down."""
        return not self.derivable and (bool({"agent", "host lost"} & self.disturbed) or bool(self.fallbacks))
