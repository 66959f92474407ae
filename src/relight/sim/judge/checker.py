"""Judges a simulated job while it runs: the invariants of docs/PROTOCOL.md, at the moment they could first be broken.

The checker sees what no controller can: the true state of every process, dead ones included. What is right is
computed beforehand, from a run that nothing disturbs; the content of every version and every rank's private state
must equal it, so a wrong bit shows where it arises and not at the end. What can be said of a journal alone, also of
a real one, is in journal.py.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import product

from relight.core.commands import Assign, Begin, Command, EndJob, FallbackTier, Kill, Restore, Resume, Save, Spawn, Stop
from relight.core.events import Restored, Stopped, TrainingDone
from relight.core.fault import Action
from relight.core.report import JobReport
from relight.core.shards import Shards
from relight.sim.model.contents import State, Violation, digest_of, part_key, reference
from relight.sim.model.fallback_tiers import Saved
from relight.sim.model.process.process import Process
from relight.sim.model.shapes import ONE_WRITE, Pattern

# Why a healthy process may be killed.
_HARMLESS_KILLS = (
    "starting all ranks again",
    "no longer needed",
    "training finished",
    "said again",
    "again: it was declared failed",
)

# Where a bit may flip of what was just copied.
_BEHIND_A_COPY = ("TAKE_OVER", "PRIVATE", "ROLLBACK", "REFORM")


def _heard(worker: Process) -> int:
    """The newest generation that undid versions, as far as this process has been told."""
    return worker.lower.history if worker.lower is not None else 0


class Checker:
    """Told of everything as it happens; raises Violation."""

    def __init__(
        self, world_size: int, until: int, workers: Mapping[str, Process], pattern: Pattern = ONE_WRITE
    ) -> None:
        self.workers = workers
        self._world_size = world_size
        self._until = until
        self._pattern = pattern
        self._states, self._privates, _ = reference(world_size, until, pattern)
        self._finished = 0  # newest version that anyone, dead or alive, ever finished
        self._begun = 0  # newest step that anyone began
        self.shown = 0  # newest version that engines answer with
        self._falls: tuple[tuple[int, int], ...] = ()  # generation and target of each time that versions were undone
        # A version, and who has each rank's snapshot of it.
        self._kept: tuple[int, tuple[tuple[str, ...], ...]] = (-1, ())
        self._falling = False  # the last of them is not finished
        self._generation = 1
        self._standing: Command | None = None  # the newest order to all
        self._struck: tuple[tuple[Action, str, str], ...] = ()  # what, process, point
        self.disturbed: set[str] = set()  # kinds of faults that are not of one process
        self.parts = 1  # that the state is divided into
        self.verify_every = 0  # steps from one comparison of states to the next
        self._copied_wrong = False  # from a rank whose bits had flipped, when no other held that part
        self.spoilt: set[int] = set()  # contents with a flipped bit, and all that was computed from them
        self.derivable = False  # private state follows from rank and step: it cannot be lost
        self.fenced: set[str] = set()  # processes of hosts that were given up; they may live on
        self._lost_hosts: set[str] = set()

    def copy(self, workers: Mapping[str, Process]) -> "Checker":
        """The same, about copies of the workers."""
        twin = Checker.__new__(Checker)
        twin.__dict__.update(self.__dict__)
        twin.workers = workers
        return twin

    def key(self) -> Hashable:
        """What later verdicts depend on."""
        struck = tuple([(action, name) for action, name, _ in self._struck])
        return self._finished, self._begun, self.shown, self._generation, struck

    def key_of_all(self) -> Hashable:
        """The same, as far as it is not about one rank."""
        return self._finished, self._begun, self.shown, self._generation

    def struck_late(self) -> set[int]:
        """Ranks of which a fault struck a process that had done its last step: that excuses a late failure."""
        workers = [self.workers[name] for _, name, _ in self._struck]
        return {worker.rank for worker in workers if worker.state.version == self._until}

    # --- what happens -------------------------------------------------------------------------------------------
    def struck(self, action: Action, worker: Process) -> None:
        """A fault is about to strike."""
        self._struck += ((action, worker.name, worker.point),)

    def lost_host(self, name: str) -> None:
        """The controller is about to be told that this host is gone."""
        self.disturbed.add("host lost")
        self._lost_hosts.add(name)

    def found_host(self, name: str) -> None:
        """It is about to be told that this host is here."""
        self._lost_hosts.discard(name)

    def follows(self, made: int, of: Iterable[int]) -> None:
        """One content is computed from others: wrong, if one of these is."""
        if not self.spoilt.isdisjoint(of):
            self.spoilt.add(made)

    def began_step(self, worker: Process) -> None:
        """I2, I3, I7: the right state at the right place, and nothing finished is done again."""
        step = worker.state.version
        self._check_content(worker, "computes with")
        if worker.name in self.fenced:
            return  # it does not know, and cannot end the step without the others
        if step < self._finished:
            raise Violation(f"I7: rank {worker.rank} repeats step {step} though version {self._finished} was finished")
        if step < self._begun:
            raise Violation(f"I2: more than the step in flight is repeated: {step} again, begun {self._begun}")
        self._begun = max(self._begun, step)

    def committed(self, worker: Process) -> None:
        """I1 and I6: one content per version; live versions are v, or v and v+1."""
        self._check_content(worker, "finished")
        is_undone = bool(self._falls) and worker.generation < self._falls[-1][0]  # all went back meanwhile, but it
        if not is_undone:
            self._finished = max(self._finished, worker.state.version)
        if worker.name in self.fenced:
            return  # what it finished, its successor must not undo: that I7 sees to
        if worker.state.content in self.spoilt and worker.healthy and self._must_not_spread():
            raise Violation(
                f"I1: rank {worker.rank} applies what another rank computed from a state with a flipped bit"
            )
        versions = {w.state.version for w in self._members() if not w.blank}
        if max(versions) - min(versions) > 1:
            raise Violation(f"I6: live versions are {sorted(versions)}")

    def overwrites(self, worker: Process) -> None:
        """I8: a copy goes only into a rank that holds nothing."""
        if not self._is_lost(worker):
            raise Violation(f"I8: a copy over the intact state of rank {worker.rank} ({worker.name})")

    def established(self, version: int) -> None:
        """Some rank knows that every rank's snapshot of that version is with itself and with its buddy."""
        self._kept = version, tuple(self._holders_of(rank, version) for rank in range(self._world_size))

    def _holders_of(self, rank: int, version: int) -> tuple[str, ...]:
        """The rank itself and its buddy; what an earlier buddy has is of no more use."""
        living = [(w, w.lower) for w in self.workers.values() if w.alive]
        mine = [(w.name, lower) for w, lower in living if lower is not None and rank in (w.rank, lower.ward)]
        return tuple(name for name, lower in mine if lower.kept_of(rank, version) is not None)

    def keeps(self, worker: Process, snapshots: Iterable[Saved]) -> None:
        """I15: what a rank says that it holds, or goes back to, is of no version that was undone."""
        for (generation, target), saved in product(self._falls, snapshots):
            version = saved.state.version
            if saved.history < generation <= _heard(worker) and target < version:
                what = f"a snapshot of version {version}, which was undone in generation {generation}"
                raise Violation(f"I15: rank {worker.rank} keeps {what}")

    def saves(self, piece: Saved, save: Save) -> None:
        """I1 and I3 of a last checkpoint."""
        version = piece.state.version
        if version != save.target or not self._is_right(piece.state):  # a flipped bit may go unnoticed until here
            raise Violation(f"I1: rank {piece.rank} writes {piece.state} into a checkpoint of version {save.target}")
        if piece.private != self._privates[version][piece.rank]:
            raise Violation(f"I3: a wrong private state of rank {piece.rank} is written into a checkpoint of {version}")

    def reads(self, worker: Process, pieces: Mapping[int, Saved]) -> None:
        """I15: the pieces of a checkpoint are of one history, be it one that was undone."""
        if len({piece.history for piece in pieces.values()}) > 1:
            raise Violation(f"I15: rank {worker.rank} reads a checkpoint that is mixed from several histories")

    def published(self, worker: Process, version: int, content: int) -> None:
        """I11: engines answer with a version only if every rank holds it, and with one content."""
        if worker.name in self.fenced:
            return  # what engines on a host that is cut off see is not judged
        if version > self._until or (content != self._states[version].content and content not in self.spoilt):
            raise Violation(f"I11: {worker.name} publishes a version {version} of another content")
        if version < self.shown:
            raise Violation(f"I11: engines go back from version {self.shown} to {version}")
        behind = [w for w in self._members() if not w.blank and w.state.version < version]
        if behind:
            ranks = sorted(w.rank for w in behind)
            raise Violation(f"I11: version {version} is published while ranks {ranks} do not hold it")
        self.shown = version

    def commanded(self, command: Command, members: Iterable[str]) -> None:
        """Called before the command is carried out."""
        if isinstance(command, Begin | Resume) and len(command.buddies) not in (0, self._world_size):
            raise Violation(
                f"I15: {len(command.buddies)} of {self._world_size} ranks are told who keeps their snapshots"
            )
        if command == self._standing or command.why.startswith("again: "):
            # Said again to an agent, or by a controller, that was restarted. Perhaps its predecessor never said it.
            self._falling = self._falling and not isinstance(command, Resume)
            return
        if isinstance(command, Begin | Stop | Restore | Resume | Save):
            self._standing = command
        match command:
            case Stop() | Begin():
                self._check_generation(command)
            case Spawn():
                if command.agent in self._lost_hosts:
                    raise Violation(f"I14: {command.process} is placed on {command.agent}, which is lost")
            case Kill():
                self._check_kill(command)
            case Restore():
                self._check_current(command)
                self._check_restore(command, [self.workers[name] for name in members])
            case Save():
                if command.target < self._finished:
                    raise Violation(f"I7: {command.target} is saved last, though version {self._finished} was finished")
            case Resume():
                self._falling = False
                self._check_current(command)
                for name in members:
                    self._check_content(self.workers[name], "resumes with")
                self._check_alike([self.workers[name] for name in members])
            case Assign():
                self._check_current(command)

    def final(self, end: EndJob, report: JobReport) -> None:
        """The job has ended; was that its right end?"""
        quiet = not self._struck and not self.disturbed
        if quiet and self._generation > 1 and not any(f.rank < 0 for f in report.failures):
            raise Violation(f"L3: generation {self._generation} though nothing ever happened")
        if not end.error:
            members = self._those_who_are_done()
            self._check_completed(members)
            self._check_report(report, [worker.state.content for worker in members])
        elif self._is_torn_at_the_end(end.error):
            pass  # it had to end anyway, and what a last checkpoint would need was torn
        elif any(text in end.error for text in ("every replica", "no intact replica", "every copy is lost")):
            self._check_all_lost(end)
        elif not self._is_excused(end.error):
            raise Violation(f"L1: the job ended without need: {end.error}")

    # --- judgement ----------------------------------------------------------------------------------------------
    def _members(self) -> list[Process]:
        return [w for w in self.workers.values() if w.alive and w.rank >= 0 and w.name not in self.fenced]

    def _those_who_are_done(self) -> list[Process]:
        """In rank order: who said last that it has done all steps. By now they have ended."""
        done = [(w.last_report.generation, w) for w in self.workers.values() if isinstance(w.last_report, TrainingDone)]
        last = max((generation for generation, _ in done), default=0)
        return sorted((worker for generation, worker in done if generation == last), key=lambda worker: worker.rank)

    def _check_content(self, worker: Process, what: str) -> None:
        state = worker.state
        if worker.blank or not self._is_right(state):
            raise Violation(f"I1: rank {worker.rank} ({worker.name}) {what} a wrong version {state.version}: {state}")
        if worker.private != self._privates[state.version][worker.rank]:
            raise Violation(f"I3: rank {worker.rank} ({worker.name}) {what} a wrong private state of {state.version}")

    def _is_right(self, state: State) -> bool:
        """That of an undisturbed run, but for bits that flipped by themselves: how far they get is judged apart."""
        right = self._states[min(state.version, self._until)]
        return state == right or (state.content in self.spoilt and state._replace(content=right.content) == right)

    def _must_not_spread(self) -> bool:
        """Whether nobody may compute with what a wrong rank computed: states are compared in every step, whatever else
        fails in the meantime. Nobody can compare what only one rank holds, or what all others have copied from it; and
        in a step that turns out to be longer than was learnt, the rest comes after the comparison."""
        compared = self.verify_every == 1 and not self._pattern.has_surprises
        return compared and self._world_size >= 2 * self.parts and not self._copied_wrong

    def _check_alike(self, members: Sequence[Process]) -> None:
        """I5: all say that they hold the same, each of its part."""
        flipped = {name for action, name, _ in self._struck if action is Action.FLIP_PARAMETER}
        self._copied_wrong |= any(w.state.content in self.spoilt and w.name not in flipped for w in members)
        said: dict[str, str] = {}
        for worker in members:
            if isinstance(worker.last_report, Restored):
                digest = worker.last_report.state_digest
                if said.setdefault(part_key(worker.rank, self.parts), digest) != digest:
                    raise Violation(f"I5: rank {worker.rank} resumes though what it said to hold is not what others do")

    def _check_generation(self, command: Stop | Begin) -> None:
        """I10. Begin belongs to the generation that the ranks were started in."""
        first = isinstance(command, Begin) and command.generation >= self._generation
        if not first and command.generation <= self._generation:
            raise Violation(f"I10: generation {command.generation} after {self._generation}")
        self._generation = command.generation

    def _check_current(self, command: Assign | Restore | Resume) -> None:
        if command.generation < self._generation:
            raise Violation(f"I9: {type(command).__name__} of generation {command.generation} in {self._generation}")

    def _check_kill(self, kill: Kill) -> None:
        worker = self.workers.get(kill.process)
        if worker is None or not worker.healthy or any(text in kill.why for text in _HARMLESS_KILLS):
            return
        if worker.state.content in self.spoilt:
            return  # it copied from a rank of which nobody knew yet
        if worker.blank and "stop" not in kill.why:
            return  # it waits for a source that is frozen: one cannot tell them apart
        raise Violation(f"L3: {kill.process} is healthy, and is killed: {kill.why}")

    def _check_restore(self, restore: Restore, members: Sequence[Process]) -> None:
        self._check_all_stand_still(restore, members)
        for worker in members:
            self._check_alone(worker)
        self._check_sources(restore, members)
        if restore.tier is not FallbackTier.REPLICA:
            self._check_fall(restore, members)
            return
        if self._falling and restore.target != self._falls[-1][1]:
            raise Violation(
                f"I15: to {restore.target}, though the recovery that goes down to {self._falls[-1][1]} is not done"
            )
        if restore.target < self._finished:
            raise Violation(f"I7: back to {restore.target} though version {self._finished} was finished")
        if restore.target < self._begun:
            raise Violation(f"I2: back to {restore.target}, though step {self._begun} was begun")
        for worker in members:
            self._check_reachable(restore, worker)

    def _check_fall(self, restore: Restore, members: Sequence[Process]) -> None:
        """I15, and the only exception to I7: versions are undone if replicas cannot help, and as few as possible."""
        intact = {worker.rank % self.parts for worker in members if not worker.blank and not worker.page.torn}
        trusted = self._trusted(restore, members)
        if trusted is not None and not self.spoilt:
            raise Violation(f"I15: fallback to the {restore.tier}, because states differ, which they do not")
        if trusted is not None and restore.target > trusted:
            raise Violation(f"I15: down to version {restore.target}, but replicas agreed last at {trusted}")
        sound = intact == set(range(self.parts)) and trusted is None
        if sound and not self._falling and not self._private_may_be_lost():
            raise Violation(f"I15: fallback to the {restore.tier}, though every part of the state is held by a rank")
        floor = self._falls[-1][1] if self._falling else self._finished
        floor = floor if trusted is None else min(floor, trusted)
        whole = restore.tier is FallbackTier.CHECKPOINT  # all of it is of one history, undone or not
        if restore.target > floor and not whole:
            raise Violation(f"I15: down to version {restore.target}, though all had gone back to {floor}")
        known = not {"agent", "host lost"} & self.disturbed  # else with a page it is lost who finished what
        if known and not self._falling and restore.undone != max(0, self._finished - restore.target):
            said = f"{restore.undone} versions are said to be undone"
            raise Violation(f"I15: {said}, from {self._finished} back to {restore.target}")
        better = [version for version in self._complete_snapshots(members) if restore.target < version <= floor]
        if better or (restore.tier is FallbackTier.CHECKPOINT and self._complete_snapshots(members, restore.target)):
            raise Violation(f"I15: down to {restore.target} by the {restore.tier}, though {better} are in memory")
        self._falls += ((restore.generation, restore.target),)
        if restore.target < self._kept[0]:
            self._kept = -1, ()
        self._falling = True
        self._finished = self._begun = restore.target

    def _trusted(self, restore: Restore, members: Sequence[Process]) -> int | None:
        """The newest version before which no bit can have flipped that was found; None: none was."""
        if restore.distrust < 0:
            return None
        reports = [worker.last_report for worker in members]
        return min(restore.distrust - 1, max(r.agreed for r in reports if isinstance(r, Stopped)))

    def _complete_snapshots(self, members: Sequence[Process], only: int = -1) -> list[int]:
        """Versions of which every rank's snapshot was reported by those who stand still."""
        holders: dict[int, set[int]] = {}
        for worker in members:
            report = worker.last_report
            for snapshot in report.snapshots if isinstance(report, Stopped) else ():
                holders.setdefault(snapshot.version, set()).add(snapshot.rank)
        return [v for v, ranks in holders.items() if len(ranks) == self._world_size and only in (-1, v)]

    def _check_sources(self, restore: Restore, members: Sequence[Process]) -> None:
        """I14: nobody copies from a process of a host that was given up."""
        known = {worker.name for worker in members}
        strangers = [source.address for source in restore.sources if source.address not in known]
        if strangers:
            raise Violation(f"I14: the state is to be copied from {strangers}, which hold no rank")
        served = {source.shard for source in restore.sources}
        for rank in restore.targets:
            if part_key(rank, self.parts) not in served:
                raise Violation(f"I5: rank {rank} is to copy {part_key(rank, self.parts)}, which no source holds")
        held = [(source, source.rank if source.of < 0 else source.of) for source in restore.sources]
        wrong = [source for source, rank in held if source.shard != part_key(rank, self.parts)]
        if wrong:
            raise Violation(f"I4: rank {wrong[0].rank} is said to hold {wrong[0].shard}")

    def _check_reachable(self, restore: Restore, worker: Process) -> None:
        """I5, I8: blank ranks copy; each other one is there, or holds the gradient of the one step that is missing."""
        version = worker.state.version
        prepared = worker.last_report.prepared if isinstance(worker.last_report, Stopped) else -1
        is_lost = self._is_lost(worker)
        if worker.page.torn and not is_lost:
            raise Violation(f"I13: rank {worker.rank} stands still inside a write")
        if (worker.rank in restore.targets) is not is_lost:
            raise Violation(f"I8: rank {worker.rank}, blank: {is_lost}, and the targets are {restore.targets}")
        if not is_lost and restore.target not in (version, prepared + 1 if prepared == version else version):
            raise Violation(f"I5: rank {worker.rank} is to reach {restore.target} from {version}, prepared {prepared}")

    def _is_lost(self, worker: Process) -> bool:
        """It holds nothing, or was interrupted inside a step that turned out to be longer than was learnt."""
        return worker.blank or (worker.holds_nothing and self._pattern.has_surprises)

    def _check_all_stand_still(self, restore: Restore, members: Sequence[Process]) -> None:
        """Rule 5: the decision rests on reports of this generation, from processes that do not move."""
        if len(members) != self._world_size:
            raise Violation(f"I9: a decision with {len(members)} of {self._world_size} ranks")
        for worker in members:
            if worker.alive and worker.standing_in != restore.generation:
                raise Violation(
                    f"I9: a decision in generation {restore.generation} while {worker.name} is in {worker.point} "
                    f"and last stood still in {worker.standing_in}"
                )

    def _check_alone(self, worker: Process) -> None:
        for other in self.workers.values():
            if other is not worker and other.rank == worker.rank and other.alive and other.name not in self.fenced:
                raise Violation(f"I10: rank {worker.rank} was given to {worker.name} while {other.name} lives")

    def _check_completed(self, members: Sequence[Process]) -> None:
        """I12: the end is that of the run that nothing disturbed."""
        if len(members) != self._world_size:
            raise Violation(f"I12: the job ended well, and {len(members)} ranks had done all steps")
        held: dict[int, int] = {}  # content of each part
        for worker in members:
            self._check_content(worker, "ends with")
            if held.setdefault(worker.rank % self.parts, worker.state.content) != worker.state.content:
                raise Violation(f"I12: rank {worker.rank} ends with another content than those who hold the same part")
            if worker.state.applied != tuple(range(self._until)):
                raise Violation(f"I2: rank {worker.rank} applied the steps {worker.state.applied}")

    def _check_report(self, report: JobReport, contents: Sequence[int]) -> None:
        """What people read must be what happened. `contents`: by rank, which are right, but for flipped bits."""
        if (report.final_version, report.until, report.error) != (self._until, self._until, ""):
            raise Violation(f"I12: the report says version {report.final_version} of {report.until}: {report.error}")
        ranks = range(self._world_size)
        keys = [part_key(rank, self.parts) for rank in ranks]
        digests = [digest_of(content, rank, self.parts) for rank, content in enumerate(contents)]
        if report.final_state_digest != Shards(keys).digest(digests):
            raise Violation(f"I12: the report has the digest {report.final_state_digest}")
        answered = sorted(number for recovery in report.recoveries for number in recovery.failures)
        if answered != [failure.number for failure in report.failures]:
            raise Violation(f"I12: failures {answered} were answered, of {len(report.failures)}")

    def _check_all_lost(self, end: EndJob) -> None:
        holders = [
            worker
            for worker in self.workers.values()
            if worker.healthy and worker.page.rank >= 0 and not self._is_lost(worker) and worker.name not in self.fenced
        ]
        of_private = self._falling and self._private_may_be_lost()  # that is why they were going back
        if {worker.rank % self.parts for worker in holders} == set(range(self.parts)) and not of_private:
            names = ", ".join(worker.name for worker in holders)
            raise Violation(f"L1: {names} hold all of the state, but: {end.error}")
        kept, places = self._kept
        living = {worker.name for worker in self.workers.values() if worker.healthy and worker.name not in self.fenced}
        if places and all(living & set(holders) for holders in places):
            raise Violation(f"L1: of version {kept} every rank's snapshot had a holder that lives, but: {end.error}")
        members = self._members()
        seen = [set(w.last_report.checkpoints) for w in members if isinstance(w.last_report, Stopped)]
        if len(seen) == self._world_size and set.intersection(*seen) and not self.spoilt:
            raise Violation(f"L1: all ranks see checkpoints {sorted(set.intersection(*seen))}, but: {end.error}")
        below = self._complete_snapshots(members) if len(members) == self._world_size else []
        if below:
            raise Violation(f"L1: snapshots of versions {below} are in memory, but: {end.error}")

    def _private_may_be_lost(self) -> bool:
        """With its page; or its page had none any more, because the rank was on its way down."""
        return not self.derivable and (bool({"agent", "host lost"} & self.disturbed) or bool(self._falls))

    def _is_torn_at_the_end(self, error: str) -> bool:
        """Whether the script's own bug ends the job, and some survivor was torn by a surprise when it did."""
        why, unsaved, _ = error.partition("No last checkpoint was written: ")
        torn = any(w.alive and not w.blank and self._is_lost(w) for w in self._members())
        return bool(unsaved) and torn and "times in the same place" in why and self._is_excused(why)

    def _is_excused(self, error: str) -> bool:
        """Whether these faults must end a job in this way."""
        kinds = [action for action, _, _ in self._struck]
        points = {point for _, _, point in self._struck}
        struck = [(kind, self.workers[name]) for kind, name, _ in self._struck]
        unsaved = error.partition("No last checkpoint was written: ")[2]
        if unsaved.startswith(("it was not done within", "not all of it is there")):
            # Who cannot write says so, or is known to be dead; unless it hung once it had said that it stands still.
            reports = [worker.last_report for worker in self.workers.values() if worker.hung]
            hangs = any(isinstance(r, Stopped) and r.generation == self._generation for r in reports)
            torn = any(worker.surprised for worker in self.workers.values())
            return hangs or torn or self._private_may_be_lost()
        if unsaved and not self.disturbed and all(kind is Action.RAISE for kind in kinds):
            # Who raised stays and keeps its state, so nothing of it is missing.
            return unsaved.startswith(("no step was finished yet", "that of step"))
        if error.startswith("training finished, but"):
            late = [worker for _, worker in struck if worker.state.version == self._until]
            return any(f"rank {worker.rank} " in error for worker in late)
        if "before its first step" in error:
            loading = {"START", "LOADING", "ENTERED"} & points
            return bool(loading) and any(kind in (Action.EXIT, Action.RAISE) for kind in kinds)
        if "did not reach its first step" in error:
            return any(kind is Action.LOOP and worker.state.version == 0 for kind, worker in struck)
        if "private state" in error:  # it dies with the process and its agent
            return self._private_may_be_lost()
        if "differs between" in error and Action.FLIP_PARAMETER in kinds:
            alone = len(kinds) == 1 and not self.disturbed and self._world_size >= 3 * self.parts
            return not alone or "of version 1 " in error  # right behind the first step it is taken for the script's
        if "halting rather than training" in error:  # a copy that is not what was copied
            return any(kind is Action.FLIP_PARAMETER and point in _BEHIND_A_COPY for kind, _, point in self._struck)
        if "was lost before the first step" in error or "was lost before its scripts had ended" in error:
            return "host lost" in self.disturbed
        if "starts have failed" in error:
            return len(kinds) + ("agent" in self.disturbed) > 3  # one that died before it could say what it had started
        if "times in the same place" in error:
            again = [worker.rank for kind, worker in struck if kind in (Action.LOOP, Action.RAISE)]
            return len(again) > len(set(again)) or "blackhole" in self.disturbed
        if "failed before they could take rank" in error:
            with_agent = "agent" in self.disturbed  # before it could say that it had started them
            return sum(worker.is_standby for _, worker in struck) + with_agent >= 3
        return False
