"""training/training.py, barrier.py and publishing.py: from the start of the script through all steps to its end."""

from collections.abc import Sequence

from relight.core import events as ev
from relight.core.commands import Assign, Begin, Release
from relight.core.position import Phase
from relight.sim.contents import (
    State,
    contribution,
    digest_of,
    first_private,
    next_private,
    part_key,
    reduce,
)
from relight.sim.process.runtime import Runtime


class Steps(Runtime):
    """All that a process does while nothing fails."""

    __slots__ = ()

    # --- life before and beside training ------------------------------------------------------------------------
    def begin(self) -> None:
        """The process starts: a rank waits to be told its number, a standby runs the script at once."""
        self._stamp(Phase.STARTING)
        if self.is_standby:
            self._go_to("LOADING")
        else:
            self.poke()

    def _on_start(self) -> None:
        self._take_assignment(self.orders[Assign])
        self.group_generation = self.generation
        self._go_to("LOADING")

    def _on_loaded(self) -> None:
        if self.is_standby:
            self._go_to("WARMUP")
            return
        self.private = first_private(self.rank)
        self.page.keep_private(0, self.private)
        self._report(
            ev.TrainingEntered(
                process=self.name,
                rank=self.rank,
                version=0,
                layout_digest="layout",
                state_digest=self._digest(),
                until=self.world.until,
                shard=part_key(self.rank, self.world.parts),
                buddy_every=self.lower.buddy_every if self.lower is not None else 0,
                checkpoint_every=self.lower.checkpoint_every if self.lower is not None else 0,
            )
        )
        self._go_to("ENTERED")

    def _digest(self) -> str:
        return self._digest_of(self.state)

    def _digest_of(self, state: State) -> str:
        return digest_of(state.content, self.rank, self.world.parts)

    def _on_begin(self) -> None:
        if Begin in self.orders:
            self.began = self.agreed = self.state.version
            if self.lower is not None:
                self.lower.assign(self.orders[Begin].buddies)
        self._offer_step()

    def _on_warm(self) -> None:
        self._stamp(Phase.STANDBY)
        self._report(ev.StandbyReady(process=self.name, layout_digest="layout"))
        self._go_to("IDLE")

    def _on_promoted(self) -> None:
        self._take_assignment(self.orders[Assign])
        self._go_to("PROMOTED")

    def _on_first_recovery(self) -> None:
        self.closed = True
        self._recover()

    def _take_assignment(self, assign: Assign) -> None:
        self.rank = self.page.rank = assign.rank
        self.generation = self.page.generation = assign.generation

    # --- the loop -----------------------------------------------------------------------------------------------
    def _offer_step(self) -> None:
        """Training._offer and, after the last step, Training._finish."""
        if self.closed:
            self._recover()
        elif self.state.version < self.world.until:
            self.page.step = self.page.version = self.state.version
            self._stamp(Phase.OUTSIDE)
            if self.lower is not None:
                self.lower.between_steps()
            self._publish()
            self._go_to("OUTSIDE")
        else:
            self._finish()

    def _begin_step(self) -> None:
        self.page.prepared = self.prepared = -1
        self.started = self.page.step = self.state.version
        self._stamp(Phase.FORWARD)
        self.world.began_step(self)
        self._go_to("FORWARD")

    def _run_forward(self) -> None:
        if self.closed:
            self._recover()
            return
        self._stamp(Phase.BACKWARD)
        mine = contribution(self.state, self.private, self.rank)
        self.world.follows(mine, self.state.content)
        if not self._enter("GRADIENT", mine):
            self._recover()

    def _enter(self, kind: str, contribution: int) -> bool:
        """Begin a collective. False if the generation is closed, so that it breaks at once."""
        if self.closed:
            return False
        group = self.world.group(self.group_generation)
        self.page.collectives += 1
        self.operation = group.enter(self.rank, (kind, self.state.version, self.state.lineage), contribution)
        self.world.entered(group, self.operation)
        self._go_to(kind)
        return True

    def _outcome(self) -> dict[int, int] | None:
        """Everyone's contributions, or None if the collective broke."""
        operation = self.world.group(self.group_generation).operations.get(self.operation)
        if operation is None or not operation.outcome[self.rank]:
            return None
        return operation.entered

    def _on_gradient(self) -> None:
        contributions = self._outcome()
        if contributions is None:
            self._await_stop()
        elif self.closed:
            self._recover()
        else:
            self.gradient = reduce(contributions)
            self.world.follows(self.gradient, *contributions.values())
            self.next_private = next_private(self.private, self.state.version)
            self.page.forget_private(self.state.version + 1)
            if self._compares():
                self._compare()
            else:
                self._go_to("PREPARE")

    # --- barrier and write --------------------------------------------------------------------------------------
    def _compare(self) -> None:
        """Barrier._compare: on nobody's side is the gradient good for a step until all states are known to be alike."""
        self._stamp(Phase.BARRIER)
        if not self._enter("COMPARE", self.state.content):
            self._recover()

    def _on_compared(self) -> None:
        contents = self._outcome()
        if contents is None:
            self._await_stop()
        elif self._differ(digests := [contents[rank] for rank in sorted(contents)]):
            self._await_replacement(digests)
        else:
            self.agreed = self.state.version
            self._go_to("PREPARE")

    def _on_kept(self) -> None:
        if self.keeps_private_before_barrier:
            self.page.keep_private(self.state.version + 1, self.next_private)
        self.page.prepared = self.prepared = self.state.version
        if self.confirms_early:
            self._stage(self.state.updated(self.gradient))
            self._confirm(self.state.version + 1)
        self._go_to("READY")

    def _enter_barrier(self) -> None:
        self._stamp(Phase.BARRIER)
        if not self.has_barrier:
            self._write()
            return
        if not self._enter("BARRIER", 1 if self.lower is None else self.lower.vote()):
            self._recover()

    def _compares(self) -> bool:
        """Ballot.entries: whether the states are compared in this step."""
        every, version = self.world.verify_every, self.state.version
        is_first = (self.began == 0 or self.generation == 1) and version == self.began + 1
        return bool(every) and (is_first or version % every == 0)

    def _on_barrier(self) -> None:
        votes = self._outcome()
        if votes is None:
            self._await_stop()
            return
        if self.lower is not None:
            self.lower.count(sum(votes.values()))
        self._confirm(self.state.version)
        self._write()

    def _differ(self, digests: Sequence[int]) -> bool:
        parts = self.world.parts
        return any(digest != digests[rank % parts] for rank, digest in enumerate(digests))

    def _await_replacement(self, digests: Sequence[int]) -> None:
        """Runtime.await_replacement: say so, and wait until the controller has decided who is wrong."""
        self.world.send(
            self,
            ev.StateDiffers(
                process=self.name,
                rank=self.rank,
                generation=self.generation,
                step=self.state.version,
                digests=tuple(digests),
                noticed_ns=1,
            ),
        )
        self._go_to("DIFFERS")

    def _write(self) -> None:
        self.prepared = -1
        if not self.keeps_private_before_barrier:
            self.page.keep_private(self.state.version + 1, self.next_private)
        self.page.torn = True
        self._stamp(Phase.OPTIMIZER)
        self._go_to("OPTIMIZER")

    def _on_written(self) -> None:
        if self.closed and not self.finishes_writes and self.restore is None:
            self._recover(torn=True)
            return
        self._go_to("AFTER_WRITE")

    def _commit(self) -> None:
        before, self.state = self.state, self.state.updated(self.gradient)
        self.world.follows(self.state.content, before.content, self.gradient)
        self.private = self.next_private
        page = self.page
        page.version, page.torn = self.state.version, False
        page.commits += 1
        self._stamp(Phase.OUTSIDE)
        self.world.committed(self)
        if self.first_after_recovery:
            self.first_after_recovery = False
            self.world.send(
                self,
                ev.StepResumed(
                    process=self.name,
                    rank=self.rank,
                    generation=self.generation,
                    step=self.started,
                    resumed_ns=1,
                    forward_ns=2,
                    commit_ns=3,
                ),
            )
        self._go_to("AFTER_STEP")

    def _after_step(self) -> None:
        if self.restore is not None or self.closed:
            self._recover()
        else:
            self._offer_step()

    # --- publishing (training/publishing.py) --------------------------------------------------------------------
    def _publish(self) -> None:
        # After a fall engines may have newer versions: they keep them.
        is_new = self.lower is None or self.world.shown() <= self.state.version
        if self.rank == 0 and not self.is_standby and self.staged != self.state.version and is_new:
            self._stage(self.state)

    def _stage(self, state: State) -> None:
        self.staged, self.content = state.version, state.content

    def _confirm(self, version: int) -> None:
        """Every rank is known to hold `version`: the engines may answer with it."""
        if self.rank == 0 and 0 <= self.staged <= version:
            self.world.published(self, self.staged, self.content)

    # --- the end ------------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        self.page.step = self.page.version = self.state.version
        self._stamp(Phase.DONE)
        self._report(
            ev.TrainingDone(
                process=self.name,
                rank=self.rank,
                generation=self.generation,
                version=self.state.version,
                lineage=self.state.lineage,
                state_digest=self._digest(),
                cut_collectives=0,
            )
        )
        self._go_to("DONE")

    def _on_done(self) -> None:
        if Release in self.orders and not self.closed:
            if self.rank == 0:
                self._stage(self.state)
                self._confirm(self.state.version)
            self._go_to("RELEASED")
        else:
            self._recover()

    def _on_released(self) -> None:
        self.world.send(self, ev.WorkerReleased(process=self.name))
        self._go_to("EXITING")

    def _exit_well(self) -> None:
        self.die(0)
