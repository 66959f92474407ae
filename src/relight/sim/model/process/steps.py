"""training/training.py: from the start of the script through all steps to its end."""

from relight.core import events as ev
from relight.core.commands import Assign, Begin, Release
from relight.core.position import Phase
from relight.sim.model.contents import (
    State,
    contribution,
    digest_of,
    first_private,
    next_private,
    part_key,
    reduce,
)
from relight.sim.model.process.writes import Writes


class Steps(Writes):
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
        self._take_pre_images()
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
            if self.shape.written_before:
                self._write_undoably()
            else:
                self._approach_barrier()

    # --- the end of a step --------------------------------------------------------------------------------------
    def _commit(self) -> None:
        self.state = self._all_written().committed()
        self.private = self.next_private
        self._keep_what_was_written()
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
