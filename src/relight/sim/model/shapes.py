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

G is the gradient's all-reduce, W a write, C another collective, P a change of private state, B a barrier.
"""

from typing import NamedTuple


class Script(NamedTuple):
    """The shape of a step."""

    writes: int = 1
    changes_private_late: bool = False  # after the last write


class Shape(NamedTuple):
    """A script, and how many of its writes come before the barrier."""

    script: Script = Script()
    written_before: int = 0

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left to do after the barrier but to commit."""
        return self.written_before == self.script.writes

    @property
    def needs_others_late(self) -> bool:
        """Whether a collective comes after the barrier."""
        return self.script.writes - self.written_before > 1

    @property
    def is_surprise(self) -> bool:
        """Whether more than the last write comes after the barrier."""
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
}


class Pattern(NamedTuple):
    """The shapes of a job's steps, one after another and round again; all ranks have the same."""

    shapes: tuple[Shape, ...] = (Shape(),)
    relearns: bool = False  # the first step after a recovery has its barrier at the end

    def of(self, step: int, began: int) -> Shape:
        """The shape of a step, in a generation that began to train with the version `began`."""
        shape = self.shapes[step % len(self.shapes)]
        return shape.at_end if self.relearns and step == began > 0 else shape

    def is_surprise(self, step: int) -> bool:
        """Whether a step may be longer than was learnt."""
        return self.shapes[step % len(self.shapes)].is_surprise

    @property
    def has_surprises(self) -> bool:
        """Whether some step is longer than was learnt."""
        return any(shape.is_surprise for shape in self.shapes)

    def script(self, step: int) -> Script:
        """The shape of a step."""
        return self.shapes[step % len(self.shapes)].script


ONE_WRITE = Pattern()


def pattern_of(names: tuple[str, ...], *, relearns: bool = False) -> Pattern:
    """Return the pattern of the shapes of these names. Raises KeyError."""
    return Pattern(tuple(SHAPES[name] for name in names) or ONE_WRITE.shapes, relearns)
