"""Barrier, writes and publishing of the worker: a step's collectives, its writes, and the barrier among them.

The barrier stands before the last write, or at the end of the step. Writes before it can be undone, from pre-images of
what they write; the one after it is finished by each rank alone. See sim/model/shapes.py.
"""

from collections.abc import Sequence
from typing import ClassVar

from relight.core import events as ev
from relight.core.position import Phase
from relight.sim.model.contents import State, contribution, late_private, reduce
from relight.sim.model.process.runtime import Runtime
from relight.sim.model.shapes import Shape


class Writes(Runtime):
    """From the gradient of a step to where it is committed."""

    # Variants that the real worker must not have; see mutations.py.
    has_barrier: ClassVar[bool] = True
    keeps_private_before_barrier: ClassVar[bool] = True
    finishes_writes: ClassVar[bool] = True
    confirms_early: ClassVar[bool] = False
    keeps_private_anew: ClassVar[bool] = True

    __slots__ = ()

    @property
    def shape(self) -> Shape:
        """Of the step in flight."""
        return self.world.pattern.of(self.state.version, self.began)

    # --- collectives --------------------------------------------------------------------------------------------
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

    # --- writes before the barrier ------------------------------------------------------------------------------
    def _take_pre_images(self) -> None:
        """Of everything that the step may change before its barrier."""
        self.undo = self.state if self.shape.written_before else None

    def _roll_back(self) -> None:
        """The step does not count: what it has written is undone."""
        if self.undo is not None:
            self.state, self.undo = self.undo, None

    def _keep_what_was_written(self) -> None:
        """The step counts, or its state was replaced as a whole: pre-images are of no more use."""
        self.undo, self.surprised = None, False

    def _applied(self, *, last: bool) -> State:
        """The state after one more write."""
        written = self.state.written(self.gradient, last=last)
        self.world.follows(written.content, self.state.content, self.gradient)
        return written

    def _write_undoably(self) -> None:
        is_last = self.shape.script.writes == 1 or self.point == "SECOND"
        self.state = self._applied(last=is_last)
        self._halve()
        self._go_to("LAST_WRITE" if is_last else "FIRST_WRITE")

    def _halve(self) -> None:
        """A write begins, or ends."""
        before, self.state = self.state, self.state.halved()
        self.world.follows(self.state.content, before.content)

    def _on_first_write(self) -> None:
        if self.closed or not self._enter_second("SECOND"):
            self._recover()

    def _enter_second(self, kind: str) -> bool:
        """The collective between two writes, which depends on the first."""
        self._halve()
        mine = contribution(self.state, self.next_private, self.rank)
        self.world.follows(mine, self.state.content)
        return self._enter(kind, mine)

    def _on_second(self) -> None:
        if not self._take_gradient():
            return
        if self.shape.is_at_end:
            self._write_undoably()
        else:
            self._approach_barrier()

    def _take_gradient(self) -> bool:
        """False if the collective broke, or the generation was closed meanwhile."""
        contributions = self._outcome()
        if contributions is None:
            self._await_stop()
            return False
        if self.closed:
            self._recover()
            return False
        self.gradient = reduce(contributions)
        self.world.follows(self.gradient, *contributions.values())
        return True

    def _on_last_write(self) -> None:
        if self.closed:
            self._recover()
            return
        self._halve()
        self._change_private_late()
        self._approach_barrier()

    def _change_private_late(self) -> None:
        if self.shape.script.changes_private_late:
            self.next_private = late_private(self.next_private)

    # --- barrier, and what comes after it -----------------------------------------------------------------------
    def _approach_barrier(self) -> None:
        if self._compares():
            self._compare()
        else:
            self._go_to("PREPARE")

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
            self._stage(self._all_written().committed())
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
        """DigestExchange.entries: whether the states are compared in this step."""
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
        self._go_to("AFTER_WRITE" if self.shape.is_at_end else "OPTIMIZER")

    def _on_written(self) -> None:
        if self.closed and not self.finishes_writes and self.restore is None:
            self._recover(torn=True)
        elif self.shape.is_surprise:
            self._be_surprised()
        else:
            self._go_to("AFTER_WRITE")

    def _all_written(self) -> State:
        """The state after all writes of the step, the last of which may be this one."""
        shape = self.shape
        return self.state if shape.is_at_end or shape.is_surprise else self._applied(last=True)

    # --- a surprise: more comes after the barrier than was learnt -------------------------------------------------
    def _be_surprised(self) -> None:
        """What was written has no pre-image, and the rest needs the others: who is interrupted now is torn.

        If private state may change, what was kept beside the page at the barrier is not what the next version starts
        with, and is withdrawn.
        """
        self.surprised = True
        if self.keeps_private_anew and self.shape.has_second_barrier:
            self.page.forget_private(self.state.version + 1)
        self.state = self._applied(last=False)
        self._halve()
        if not self._enter_second("EXTRA"):
            self._recover()

    def _on_extra(self) -> None:
        if self._take_gradient():
            self.state = self._applied(last=True)
            self._go_to("EXTRA_WRITE")

    def _on_extra_written(self) -> None:
        """All is kept anew, and a second barrier proves that it is so everywhere, if private state may have changed."""
        if not self.shape.has_second_barrier:
            self._go_to("AFTER_WRITE")
            return
        self._change_private_late()
        if self.keeps_private_anew:
            self.page.keep_private(self.state.version + 1, self.next_private)
        if not self._enter("END", 1):
            self._recover()

    def _on_end(self) -> None:
        if self._outcome() is None:
            self._await_stop()
        else:
            self._go_to("AFTER_WRITE")

    # --- publishing (training/publish/publishing.py) ------------------------------------------------------------
    def _publish(self) -> None:
        # After a fallback engines may have newer versions: they keep them.
        is_new = self.lower is None or self.world.shown() <= self.state.version
        if self.rank == 0 and not self.is_standby and self.staged != self.state.version and is_new:
            self._stage(self.state)

    def _stage(self, state: State) -> None:
        self.staged, self.content = state.version, state.content

    def _confirm(self, version: int) -> None:
        """Every rank is known to hold `version`: the engines may answer with it."""
        if self.rank == 0 and 0 <= self.staged <= version:
            self.world.published(self, self.staged, self.content)
