"""One rank's batches and random streams, step by step: drawn once, kept for a redo, found again by a replacement."""

from typing import Any

from relight.errors import UsageError
from relight.training.connection.page import PositionPage
from relight.training.data import rng
from relight.training.data.feed import install
from relight.training.data.grouping import Groups
from relight.training.data.loaders import LoaderSource
from relight.training.data.reach import Reach
from relight.training.data.sources import CombinedSource, FunctionSource, NoSource, StatefulSource, make_source
from relight.training.data.strays import watch
from relight.training.state.digest import batch_digest, edits_of, sizes_in
from relight.training.torch_private.script_modes import hidden_from_modes, sees_calls
from relight.training.torch_private.tensors import tree_map
from relight.training.wrappers import unwrapped_data


class Batches:
    """Draws `accumulate` batches a step, and sets the random streams before and after the draw.

    With streams "step" they are a function of (seed, step, rank). With "preserve" they run on from barrier to
    barrier: what is drawn between two steps is drawn by no replacement, so it does not count.

    `rank` is everywhere the place among those who have batches of their own: the rank itself, but ranks that compute on
    one batch together (tensor parallelism) have one place, and the same random streams.
    """

    def __init__(
        self,
        data: Any,
        accumulate: int,
        seed: int,
        streams: str,
        page: PositionPage,
        *,
        stage: str = "",
        short_groups: bool = False,
    ) -> None:
        """`stage`: of a pipeline. Its ranks draw the same batch, but their forward passes have different streams."""
        if streams not in ("step", "preserve"):
            raise UsageError(f'rng={streams!r}: choose "step" or "preserve"')
        if accumulate < 1:
            raise UsageError(f"accumulate={accumulate}: at least one batch per step")
        install()
        data, self._device = unwrapped_data(data)
        self._source = make_source(data, seed, preserve=streams == "preserve")
        self._data = data
        self._reach = None if isinstance(self._source, (NoSource, FunctionSource)) else Reach({"data": data})
        self._groups = Groups(accumulate, _batches_in_an_epoch(data) if short_groups else 0)
        self._seed = seed
        self._preserve = streams == "preserve"
        self._page = page
        self._forward = f"forward {stage}" if stage else "forward"
        self._batch: Any = None
        self._draws_in_mode = False  # of the script's, that sees what drawing calls
        self._batch_of = -1  # the step whose batch is in hand
        self._held: Any = None  # of the data's own generators, after that draw
        self._edits: list[Any] = []  # what the batch was made of when it was drawn
        self._sizes: list[Any] | None = None  # of the tensors of the batch in hand, and of the last that is done
        self._sizes_before: list[Any] | None = None
        self._at_barrier: Any = None  # with "preserve": the streams at the last barrier, and after the last draw
        self._after_draw: Any = None
        self._predecessor = (-1, 0)  # step and digest of the batch that the replaced process drew last

    def start(self, step: int, rank: int) -> None:
        """Make the batch of `step` the next one, as its number says."""
        self._source.position(self._groups.first(step), rank)
        self._batch, self._batch_of = None, -1
        watch.begin()

    def holds(self, thing: Any) -> bool:
        """Return whether it belongs to the data: a generator of a DataLoader, a sampler of the script's own."""
        # Generators that an integration's sampler sets where an epoch begins, as it says.
        set_by_sampler = getattr(getattr(self._data, "batch_sampler", None), "set_by_relight", ())
        if any(thing is each for each in set_by_sampler):
            return True
        return self._reach is not None and self._reach.holds(thing)

    def rehearse(self, rank: int) -> Any:
        """A batch for a standby's warm-up."""
        self._source.position(0, rank)
        watch.begin()
        self._seed_streams("step", 0, rank)
        return self._draw(0)

    def begin_turn(self, step: int, rank: int) -> None:
        """Set the streams for code between the head of the loop and `with step`: a repeated step runs it again."""
        rng.seed_everything(self._seed, "turn", step, rank)

    def get(self, step: int, rank: int) -> Any:
        """The batch of `step`, with the streams set for its forward. The same one again in a redo."""
        self._draws_in_mode = sees_calls()
        with hidden_from_modes():
            is_drawn = self._find(step, rank)
        batch = None if is_drawn else self._draw(step)
        with hidden_from_modes():
            if is_drawn:
                self._source.put_back(self._held)
            else:
                self._keep(batch, step, rank)
            # Drawing may have used the streams; a redo draws nothing.
            self._seed_streams(self._forward, step, rank)
            if self._after_draw is not None:
                rng.put_back(self._after_draw)
        return self._batch

    def _find(self, step: int, rank: int) -> bool:
        """Set the streams for the draw. Return whether the batch is in hand."""
        if self._preserve and self._at_barrier is not None:
            rng.put_back(self._at_barrier)
        if self._data is not None:
            self._seed_streams("step", step, rank)
        is_drawn = self._data is not None and self._batch_of == step
        if is_drawn and (self._draws_in_mode or edits_of(self._batch) != self._edits):
            self.restore(step, rank)  # the script changed it in place, or a mode saw how it was drawn: draw it again
        return self._batch_of == step

    def _keep(self, batch: Any, step: int, rank: int) -> None:
        """The batch of `step` was drawn."""
        self._batch, self._batch_of = batch, step
        self._held = self._source.hold()
        if self._data is not None:
            self._edits = edits_of(batch)
            self._sizes = sizes_in(self._edits)
            self._compare_with_predecessor(step, rank)
        self._after_draw = rng.capture() if self._preserve else None

    def done(self) -> None:
        """The step is committed; its batch is of no more use."""
        self._batch, self._batch_of = None, -1
        self._sizes_before = self._sizes
        watch.turn()

    def close(self, version: int, rank: int) -> None:
        """The loop has ended: the script may read whichever data it likes.

        Streams are set for code after the loop. A replacement runs it too, and lacks what the last step has drawn.
        """
        watch.end()
        if self._at_barrier is not None:
            rng.put_back(self._at_barrier)
        self._seed_streams("after", version, rank)

    def private(self, *, between: bool = False) -> dict[str, Any]:
        """The rank-private part: data position and streams with which the next step starts.

        `between`: two steps; what was drawn since the last barrier does not count then.
        """
        if not between or self._at_barrier is None:
            self._at_barrier = rng.capture() if self._preserve else None
        return {"data": self._source.state(), "rng": self._at_barrier}

    def look(self) -> int:
        """Return a number that differs once the script has drawn from streams that run on from step to step."""
        return rng.number() if self._preserve else 0

    @property
    def has_other_sizes(self) -> bool:
        """True if the batch in hand has tensors of other shapes than the one before it, in this process."""
        return self._sizes_before not in (None, self._sizes)

    @property
    def stray(self) -> str:
        """Describe data that the script reads besides, at an unknown position; empty if nothing was seen."""
        return watch.seen

    @property
    def are_handed_over(self) -> bool:
        """True if there is data whose position is kept."""
        return not isinstance(self._source, NoSource)

    @property
    def derivable(self) -> bool:
        """True if data position and streams follow from step and rank alone."""
        return not self._preserve and self._source.state() is None

    def take_over(self, tree: dict[str, Any], step: int, rank: int) -> None:
        """Continue where the replaced process stood at the start of `step`."""
        self._predecessor = self._page.inherited_batch()
        self._adopt(tree, step, rank)

    def restore(self, step: int, rank: int) -> None:
        """Back to the start of `step`, from this rank's own private state."""
        self._adopt(self._page.read_private_tree(step), step, rank)

    def restore_position(self, step: int, rank: int) -> None:
        """Restore data with a `state_dict` once its values were set to the rank's; other data begins with these."""
        if isinstance(self._source, StatefulSource):
            self.restore(step, rank)
        elif isinstance(self._source, (LoaderSource, CombinedSource)):
            self._source.take_numbers()

    def epoch(self, step: int) -> int:
        return self._source.epoch(self._groups.first(step))

    def steps_in_an_epoch(self) -> int:
        """Return the number of steps in an epoch; 0: the data has no length, or an epoch ends inside a step."""
        try:
            batches = 0 if self._data is None or isinstance(self._source, CombinedSource) else len(self._data)
        except TypeError:
            return 0
        if self._groups.epoch:
            return self._groups.steps_in_an_epoch
        return 0 if batches % self._groups.size else batches // self._groups.size

    def _adopt(self, tree: dict[str, Any], step: int, rank: int) -> None:
        self.start(step, rank)
        if tree["data"] is not None:
            self._source.restore(tree["data"])
        self._at_barrier = tree["rng"]
        if self._at_barrier is not None:
            rng.put_back(self._at_barrier)

    def _draw(self, step: int) -> Any:
        batches = [self._source.next() for _ in range(self._groups.count(step))]
        if self._device is not None:
            batches = tree_map(self._moved, batches)
        return batches[0] if self._groups.size == 1 else batches

    def _moved(self, leaf: Any) -> Any:
        return leaf.to(self._device) if hasattr(leaf, "to") else leaf

    def _seed_streams(self, purpose: str, step: int, rank: int) -> None:
        if not self._preserve:
            rng.seed_everything(self._seed, purpose, step, rank)

    def _compare_with_predecessor(self, step: int, rank: int) -> None:
        digest = batch_digest(self._batch)
        if self._predecessor[0] == step and self._predecessor[1] != digest:
            raise UsageError(
                f"the replacement of rank {rank} drew another batch for step {step} than the process it replaced: the "
                "data was made at random without a seed, or depends on something that was fixed before the rank was "
                "known. Seed what makes it; read job.rank when it is needed (torch's DistributedSampler is corrected "
                "by itself), or hand over a function: relight.Training(data=lambda number: ...)"
            )
        self._page.mark_batch(step, digest)


def _batches_in_an_epoch(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        raise UsageError(
            "short_groups=True needs to know how many batches an epoch has: give data that has a length, or leave the "
            "argument out; then a step takes what it lacks from the next epoch"
        ) from None
