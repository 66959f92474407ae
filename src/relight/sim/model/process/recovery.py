"""training/worker/recovery.py: what a process does with the orders of a recovery."""

from relight.core import events as ev
from relight.core.commands import FallbackTier, Restore, Resume, Save
from relight.sim.model.contents import Violation, derived_private, part_key
from relight.sim.model.fallback_tiers import Saved
from relight.sim.model.network import Copying
from relight.sim.model.points import CONNECT_SECONDS, PATIENCE_SECONDS
from relight.sim.model.process.steps import Steps


class Recovery(Steps):
    """From the decision on; until then it stands still, as runtime.py says."""

    __slots__ = ()

    def _on_parked(self) -> None:
        """The order comes first, even if a newer Stop is here too."""
        self.standing_in = 0
        kind = Restore if self._has(Restore, self.stop_seen) else Save
        if not self._has(kind, self.stop_seen):
            self.stop_seen = self.newest
            self._go_to("STOP")
            return
        restore = self.restore = self.orders[kind]
        if self.prepared == self.state.version and not self.blank:
            self.prepared = -1  # it leaves the barrier, one way or the other
            if restore.target == self.state.version + 1:
                self._go_to("FINISH")
                return
        if self.page.torn and not self.holds_nothing:
            raise Violation("I13: a recovery went on with a state that is half written")
        self._recover()

    def _finish_alone(self) -> None:
        self._confirm(self.state.version)
        self._write()

    def _obey(self) -> None:
        """Recovery._obey."""
        restore = self.restore
        assert restore is not None
        if isinstance(restore, Save):
            self._roll_back()
            self._save(restore)
            return
        if self.lower is not None:
            self.lower.history = restore.history
        self._begin_forming(restore.generation)
        if restore.tier is not FallbackTier.REPLICA:
            self._go_down(restore)
        elif self.rank in restore.targets:
            self._copy(restore)
        elif self.state.version != restore.target:
            self._fail_restore(f"rank {self.rank} is at version {self.state.version}, not {restore.target}")
        else:
            self._roll_back()
            if restore.targets and self.newest <= restore.generation:
                self.offer = (restore.generation, self.state)
                self.world.offered(self)
            self._go_to("ROLLBACK")

    def _save(self, save: Save) -> None:
        """Recovery._save: its part of a last checkpoint. The one that completes it says so, or who cannot."""
        self.world.saves(self, save)
        self._go_to("SAVING" if self.rank == save.rank else "FAILED")

    def _on_saved(self) -> None:
        assert isinstance(self.restore, Save)
        if self.newest > self.restore.generation:
            self._supersede()
            return
        self._say_saved()

    def _say_saved(self, error: str = "") -> None:
        assert isinstance(self.restore, Save)
        generation, version = self.restore.generation, self.restore.target
        path = "" if error else "there"
        self._report(ev.Saved(process=self.name, generation=generation, version=version, path=path, error=error))
        self._go_to("FAILED")

    def _go_down(self, restore: Restore) -> None:
        """Recovery._go_down: back to a snapshot or a checkpoint. From here until it is done this rank is blank."""
        lower = self.lower
        assert lower is not None
        is_there = not (self.blank or self.page.torn) and self.state.version == restore.target
        is_target = self.rank in restore.targets
        self.blank = self.page.torn = True
        lower.discard_after(restore.target)
        self.staged = -1
        self.page.words = [-1, -1]
        saved = None
        if restore.tier is FallbackTier.CHECKPOINT:
            pieces = lower.disk.complete[restore.target]
            self.world.reads(self, pieces)
            saved = None if is_target else pieces[self.rank]
        elif not is_target:
            saved = lower.kept_of(self.rank, restore.target)
            if saved is None and is_there:  # this recovery began again, and it had gone back before
                self._roll_back()
                self.blank = self.page.torn = False
                self.page.words[restore.target % 2] = restore.target
                self._go_to("ROLLBACK")
                return
        if saved is not None:
            self._take_back(restore, saved)
            if restore.tier is FallbackTier.CHECKPOINT:
                self.offer = (restore.generation, self.state)
                self.world.offered(self)
            self._go_to("ROLLBACK")
            return
        if restore.tier is FallbackTier.CHECKPOINT:
            self._copy(restore)
            return
        own = [source for source in restore.sources if source.of == self.rank]
        part = part_key(self.rank, self.world.parts)
        found = own or [source for source in restore.sources if source.shard == part]
        if not found or self.newest > restore.generation:
            self._fail_restore("no source has a snapshot of its part")
            return
        self.copying = Copying(found[0].address, restore.generation, restore.target, found[0].of)
        self.world.asked(self)
        self._go_to("COPY")

    def _take_back(self, restore: Restore, saved: Saved) -> None:
        """Recovery._stand_at."""
        if restore.tier is FallbackTier.BUDDY:
            self.world.keeps(self, [saved])
        target = restore.target
        private = saved.private
        if self.rank in restore.derived:
            private = derived_private(self.rank, target, self.world.pattern, known=self.world.derivable)
        self.state, self.private, self.copying = saved.state, private, None
        self.page.slots[target % 2] = (target, private)
        self.page.words[target % 2] = target
        self.blank = self.page.torn = False
        self._keep_what_was_written()
        self.page.version = self.state.version

    def _begin_forming(self, generation: int) -> None:
        self.group_generation = self.meeting_generation = 0
        meeting = self.world.rendezvous(generation) if self.newest <= generation else None
        if meeting is not None:
            meeting.join(self.rank)
            self.meeting_generation = generation
            self.world.joined(meeting)

    def _copy(self, restore: Restore) -> None:
        self.world.overwrites(self)
        self.page.torn = True
        if self.restores_in_place:  # half of it is there, and it says so of all
            self.state = self.state._replace(version=restore.target, content=-1)
            self.blank = self.page.torn = False
        if self.newest > restore.generation or not restore.sources:
            self._fail_restore("cancelled")
            return
        source = self.world.choose_source(self, restore)
        if not source and self.world.parts > 1:
            self._fail_restore("nobody serves its part")
            return
        self.copying = Copying(source, restore.generation, restore.target)
        self.world.asked(self)
        self._go_to("COPY")

    def _on_copied(self) -> None:
        assert self.copying is not None
        if self.copying.failed or self.copying.state is None:
            self._fail_restore(self.copying.failed)
        else:
            self._go_to("TAKE_OVER")

    def _take_over(self) -> None:
        assert isinstance(self.restore, Restore)
        assert self.copying is not None
        assert self.copying.state is not None
        target = self.restore.target
        if self.copying.saved is not None:
            self._take_back(self.restore, self.copying.saved)
            self._go_to("ROLLBACK")
            return
        if self.lower is not None and self.restore.tier is FallbackTier.CHECKPOINT:
            piece = self.lower.disk.complete[target][self.rank]
            self._take_back(self.restore, piece._replace(state=self.copying.state))
            self._go_to("ROLLBACK")
            return
        if self.rank in self.restore.derived:
            derived = derived_private(self.rank, target, self.world.pattern, known=self.world.derivable)
            self.page.keep_private(target, derived)
        private = self.page.read_private(target)
        if private is None and self.world.several_hosts and self.point != "PRIVATE":
            self._go_to("PRIVATE")
            return
        if private is None:
            self._lack_private()
            return
        self.state, self.private, self.copying = self.copying.state, private, None
        if self.claims_private:
            self.page.words[target % 2] = target
        self.blank = self.page.torn = False
        self._keep_what_was_written()
        self.page.version = self.state.version
        self._go_to("ROLLBACK")

    def _lack_private(self) -> None:
        assert self.restore is not None
        version = self.restore.target
        self._fail_restore(f"the rank-private state of version {version} is not beside this rank's page")

    def _rolled_back(self) -> None:
        assert self.restore is not None
        if self.newest <= self.restore.generation and not self.meeting_generation:
            self._fail_restore("the rendezvous of that generation is closed")
        else:
            self._go_to("REFORM")

    def _on_formed(self) -> None:
        assert self.restore is not None
        generation = self.restore.generation
        if self.newest > generation:
            self._supersede()
            return
        self._report(
            ev.Restored(
                process=self.name,
                rank=self.rank,
                generation=generation,
                version=self.state.version,
                lineage=self.state.lineage,
                state_digest=self._digest() if self.offer is None else self._digest_of(self.offer[1]),  # as it was sent
                layout_digest="layout",
                progress=ev.RestoreProgress(),
            )
        )
        self._go_to("RESTORED")

    def _on_resume(self) -> None:
        assert self.restore is not None
        if self._has(Resume, self.restore.generation):
            self._go_to("RESUME")
        else:
            self._supersede()

    def _open_generation(self) -> None:
        assert isinstance(self.restore, Restore)
        generation = self.restore.generation
        if self.newest > generation:
            self._supersede()
            return
        self.group_generation = self.generation = generation
        self.meeting_generation = 0
        self.copying = None
        self.began = self.agreed = self.restore.target
        if self.lower is not None:
            if self.restore.distrust >= 0 and self.rank == 0:
                self.lower.disk.discard(self.restore.distrust)
            self.lower.assign(self.orders[Resume].buddies, self.restore.keep)
        self.restore = None
        self.closed = False
        self.first_after_recovery = True
        self.is_standby = False
        self.page.prepared = -1
        self._confirm(self.state.version)
        self._offer_step()

    def _supersede(self) -> None:
        self.restore = None
        self._recover()

    def _fail_restore(self, evidence: str) -> None:
        assert self.restore is not None
        self.copying = None
        generation = self.restore.generation
        self._report(ev.RestoreFailed(process=self.name, generation=generation, evidence=evidence, culprit=""))
        self._go_to("FAILED")

    def lose_patience(self, ticket: int) -> None:
        """The wait that began with this ticket has lasted for as long as it may."""
        if not self.alive or ticket != self.ticket or self.awake or self.frozen or self.hung:
            return
        if self.point == "VERDICT":
            self.raise_in_script(f"RuntimeError: rank {self.rank}: connection reset, and nobody said why")
        elif self.point == "COPY":
            self._fail_restore("no answer from the source")
        elif self.point == "PRIVATE":
            self._lack_private()
        elif self.point == "SAVING":
            self._say_saved("not all of it is there")
        elif self.point == "REFORM":
            meeting = self.world.rendezvous(self.meeting_generation)
            if not self.waits_on and meeting is not None and meeting.complete:
                self.waits_on = True  # all have come: now it is the connections that it waits for
                self.world.plan_patience(self, CONNECT_SECONDS - PATIENCE_SECONDS["REFORM"])
                return
            self._fail_restore("the new process group could not be formed")
