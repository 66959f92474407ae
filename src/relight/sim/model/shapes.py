"""The shape of a simulated step: how many writes, and where its barrier stands among them.

A *script* is what is computed: it decides the content of the next version. A *shape* adds where relight puts the
barrier, which must not change a bit.

    one           G | B | W              the barrier before the only write
    one-end       G W | B |              the same script, barrier at the end
    two-early     G W C | B | W          the barrier before the last write; the first one has a pre-image
    two-end       G W C W | B |          the same script, barrier at the end; both have a pre-image
    late-private  G W C W P | B |        private state changes after the last write, so the barrier stands at the end
    surprise      G | B | W C W P |      more comes after the barrier than was learnt
    unexpected    G | B | W C W |        the same without a change of private state
    late-change    G | B | W P |          only private state changes after the barrier, against what was learnt
    shared-after   G | B | W | S          code after the block puts the result of a collective into the state
    code-after     G | B | W |            code after the block changes nothing, and a replacement can run it
    waits-after    G | B | W | S          the same, where ranks can wait in the collective for a replacement
    waits-twice    G | B | W | S S        the same with two such collectives
    new-buffer     G | B A B | W          rank 0 alone changes a buffer, for the first time in the job
    new-buffers    G | B A B | W          all other ranks do

G is the gradient's all-reduce, W a write, C another collective, P a change of private state, B a barrier, S a
collective between two steps: a rank for which a recovery cuts it goes on alone, with its own value, unless all can meet
in it after the recovery. A is the collective
by which ranks agree on buffers that each has for itself; before it B is not passed, as some rank is not prepared.

In a job whose ranks *learn*, shapes say only what the steps compute (a GAN that is regularized in every second step:
`one,two-end`). The production's `Learner` says where the barrier stands, so which steps are surprises follows.
"""

from typing import NamedTuple

from relight.core.worker import pattern as learning


class Script(NamedTuple):
    """The shape of a step."""

    writes: int = 1
    changes_private_late: bool = False  # after the last write
    shares_after: int = 0  # collectives in code after the block, which puts the result into the state
    waits: bool = False  # a replacement can run that code, and ranks wait in its collectives until it comes there
    finders: str = ""  # which ranks change a buffer for the first time in the job: "first" (rank 0), "others", or none

    @property
    def is_rare(self) -> bool:
        """True if no general random schedule has it."""
        return self.waits or self.shares_after > 0 or self.finders != ""

    def finds(self, rank: int) -> bool:
        """Return whether that rank does."""
        return self.finders == ("others" if rank else "first")


class Shape(NamedTuple):
    """A script, and how many of its writes come before the barrier."""

    script: Script = Script()
    written_before: int = 0

    @property
    def is_at_end(self) -> bool:
        """True if nothing is left to do after the barrier but to commit."""
        return self.written_before == self.script.writes

    @property
    def needs_others_late(self) -> bool:
        """True if a collective comes after the barrier."""
        return self.script.writes - self.written_before > 1

    @property
    def is_surprise(self) -> bool:
        """True if more than the last write comes after the barrier."""
        return self.needs_others_late or (self.script.changes_private_late and not self.is_at_end)

    @property
    def at_end(self) -> "Shape":
        """The script in the form that needs no knowledge of it."""
        return Shape(self.script, self.script.writes)


SHAPES = {
    "one": Shape(),
    "one-end": Shape(Script(), 1),
    "two-early": Shape(Script(2), 1),
    "two-end": Shape(Script(2), 2),
    "late-private": Shape(Script(2, changes_private_late=True), 2),
    "surprise": Shape(Script(2, changes_private_late=True), 0),
    "unexpected": Shape(Script(2), 0),
    "late-change": Shape(Script(1, changes_private_late=True), 0),
    "shared-after": Shape(Script(shares_after=1)),
    "code-after": Shape(Script(waits=True)),
    "waits-after": Shape(Script(shares_after=1, waits=True)),
    "waits-twice": Shape(Script(shares_after=2, waits=True)),
    "new-buffer": Shape(Script(finders="first")),
    "new-buffers": Shape(Script(finders="others")),
}


class Pattern(NamedTuple):
    """The shapes of a job's steps, one after another and round again; all ranks have the same."""

    shapes: tuple[Shape, ...] = (Shape(),)
    relearns: bool = False  # the first step after a recovery has its barrier at the end
    learns: bool = False  # where barriers stand follows from the steps before

    def of(self, step: int, began: int) -> Shape:
        """The shape of a step, in a generation that began to train with the version `began`."""
        shape = self.shapes[step % len(self.shapes)]
        return shape.at_end if self.relearns and step == began > 0 else shape

    def is_surprise(self, step: int) -> bool:
        """Return whether a step may be longer than was learnt."""
        shape = self.shapes[step % len(self.shapes)]
        return shape.script != Script() if self.learns else shape.is_surprise

    @property
    def has_surprises(self) -> bool:
        """True if some step is longer than was learnt."""
        return any(self.is_surprise(step) for step in range(len(self.shapes)))

    @property
    def shares(self) -> bool:
        """True if code between some steps calls collectives."""
        return any(shape.script.shares_after > 0 for shape in self.shapes)

    def script(self, step: int) -> Script:
        """The shape of a step."""
        return self.shapes[step % len(self.shapes)].script


ONE_WRITE = Pattern()
WRITE = "W"  # the name of every write


def pattern_of(names: tuple[str, ...], *, relearns: bool = False, learns: bool = False) -> Pattern:
    """Return the pattern of the shapes of these names. Raises KeyError."""
    return Pattern(tuple(SHAPES[name] for name in names) or ONE_WRITE.shapes, relearns, learns)


# --- learning -----------------------------------------------------------------------------------------------------
def learner() -> learning.Learner:
    """Return production's learner, which believes sooner: a simulated job has few steps."""
    return learning.Learner(agreements=1, agreements_of_several=2)


def learnt_shape(script: Script, learner: learning.Learner) -> Shape:
    """The shape of a step whose barrier stands where the worker has learnt."""
    for written in range(script.writes):
        if learner.stands_before((WRITE,) * written):
            return Shape(script, written)
    return Shape(script, script.writes)


def seen_pattern(shape: Shape, learner: learning.Learner) -> learning.Pattern:
    """Return what production's transaction says at the barrier of such a step (training/transaction/transaction.py)."""
    if learner.learnt is not None and not shape.is_at_end:
        return learner.learnt
    writes = (WRITE,) * shape.script.writes
    return learning.observed(writes, len(writes) if shape.script.changes_private_late else len(writes) - 1)
