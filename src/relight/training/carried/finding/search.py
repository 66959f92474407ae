"""Looks for what a script carries: in the code of its loop, and in what the user declares."""

from collections.abc import Collection, Mapping, Sequence
from types import FrameType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from relight.script_files import is_file_of_relight
from relight.training.carried.code.iteration import Iteration
from relight.training.carried.code.refs import Place, describe, is_iterator
from relight.training.carried.code.source import short
from relight.training.carried.finding import refusals
from relight.training.carried.finding.catalog import Catalog, holder_in_data
from relight.training.carried.finding.places import key_of
from relight.training.carried.finding.spots.spot import MISSING
from relight.training.carried.reading.flow import ASKED_FOR
from relight.training.carried.reading.hooks import made_in
from relight.training.carried.reading.names import Found, Names, names_of
from relight.training.carried.values.parts import is_part
from relight.training.carried.values.trees.words import Unsupported, name_of
from relight.training.carried.values.trees.writer import write_down
from relight.training.state.values.kinds import is_fixed, kind_of
from relight.training.torch_private.distributed.ddp import unreduced


class Search:
    """Fills a catalog once the loop is known, and refuses what decides a step and cannot be carried."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._loop = catalog.loop
        self._spots = catalog.loop.spots
        self._declared_names: list[str] = []

    def declare(self, things: Sequence[Any], ignore: Sequence[str]) -> None:
        """Carry these too: names as the loop's function sees them, or objects. Leave out names in `ignore`."""
        for thing in things:
            if isinstance(thing, str):
                self._declared_names.append(thing)
                continue
            try:
                write_down(thing)
            except Unsupported as problem:
                raise refusals.of_declared(thing, problem) from None
            self._loop.declared.append(thing)
        self._catalog.ignored.update(ignore)

    def made_in(self, hooks: Sequence[MethodType], given: Mapping[str, Any]) -> str:
        """Describe what methods make which steps call, and no replacement could get; empty: nothing is known.

        `given`: what the methods get, by the names of their parameters.
        """
        made = made_in(hooks, given, self._catalog.is_foreign)
        return f"{made.layer or made.kind.__name__} ({short(made.file)}:{made.line})" if made is not None else ""

    def find(self, frame: FrameType, line: int = 0) -> None:
        """From the frame that has the block, at `line` if it does not stand there yet."""
        catalog, loop = self._catalog, self._loop
        catalog.kept.clear()
        iteration, frames = loop.find(frame, line)
        for index in range(len(loop.declared)):
            self._catalog.keep((("declared", str(index), f"object {index} of training.carry()"),))
        catalog.left_out.update(map(key_of, loop.of_epoch))
        if iteration is None:
            self._note_unread(frame)
        else:
            names = names_of(iteration, frames, self._catalog.is_foreign)
            if names.new_layer is not None and not catalog.is_ignored(names.new_layer.layer):
                raise refusals.of_layer(names.new_layer)
            self._refuse_unfrozen(names)
            catalog.shown_after, catalog.watched = names.shown_after, names.set_on_tensors
            loop.needed_between, loop.ends_late = names.needed_between, names.ends_late
            catalog.dead = {self._lasting(place) for place in names.dead}
            if names.files_changed is not None and not catalog.is_ignored(ASKED_FOR):
                file, at = names.files_changed
                self._spots.settings.files.changed_at = f"{short(file)}:{at}"
            self._keep_holders(names.found.values())
            catalog.unrepeatable.libraries.begin([loop.lasting(place) for place in names.of_libraries])
            written = {*names.dead, *(found.place for found in names.found.values())}
            catalog.comparison.rebound = {self._lasting(place) for place in written}
            for found in names.found.values():
                self._keep_found(found, iteration)
        for text in self._declared_names:
            self._keep_named(text)
        loop.look_at(frame)
        for place in loop.of_generators:
            catalog.keep(place, feeds=False, seen=True)
        catalog.begin()

    def _lasting(self, place: Place) -> Place:
        return place if len(place) == 1 else self._loop.lasting(place)

    def _keep_holders(self, found: Collection[Found]) -> None:
        """Carry what steps let stand for one object after another, before they read it, if they change these objects.

        An attribute of such an object, by itself, would belong to another object in a replacement.
        """
        for one in found:
            for length in range(1, len(one.place)):
                holder = self._lasting(one.place[:length])
                if holder in self._catalog.dead:
                    self._catalog.dead.discard(holder)
                    self._catalog.keep(holder, f"{short(one.file)}:{one.line}", feeds=one.feeds, seen=True)

    def _note_unread(self, frame: FrameType) -> None:
        """Say that the code of a loop cannot be read, unless it is an integration's own: that names what it carries.

        Raises UsageError for code that is in no file, if the user names nothing that it carries: of the classes that
        are made there, too, neither code nor objects can be told from those of libraries.
        """
        file = frame.f_code.co_filename
        if is_file_of_relight(file):
            return
        where = f"{short(file)}:{frame.f_lineno}"
        is_named = self._loop.declared or self._declared_names or self._catalog.ignored
        if file.startswith("<") and not is_named:
            raise refusals.of_text(where)
        self._catalog.say(
            "carried",
            f"{where}: the source of this loop cannot be read, so what it carries from step to step is looked for by "
            "its values alone: name the rest with training.carry()",
        )

    def _refuse_unfrozen(self, names: Names) -> None:
        """Refuse to unfreeze parameters whose gradients DDP leaves to each rank."""
        frozen = unreduced() if names.unfrozen else {}
        for made, parameters in names.unfrozen:
            name = next((frozen[id(parameter)] for parameter in parameters if id(parameter) in frozen), None)
            if name is not None and not self._catalog.is_ignored(made.layer):
                raise refusals.of_unfrozen(made, name)

    def _keep_found(self, found: Found, iteration: Iteration) -> None:
        where = f"{short(found.file)}:{found.line}"
        if (holder := holder_in_data(found.place, self._spots, self._catalog.is_of_data)) is not None:
            if found.is_of_epoch:
                return  # the data's own loader sets it to the same
            self._refuse_of_data(found, where, holder)
            return
        lasting, catalog = self._loop.lasting(found.place), self._catalog
        if found.made is not None and found.feeds and not catalog.is_ignored(describe(lasting)):
            if found.made.kind is not FunctionType:
                raise refusals.of_made(describe(lasting), found.made)
            if not found.is_left:
                raise refusals.of_function(describe(lasting), f"{short(found.made.file)}:{found.made.line}")
        one = catalog.keep(
            lasting,
            where,
            feeds=found.feeds,
            late=found.late,
            after_write=found.after_write,
            is_left=found.is_left,
        )
        if one is None:
            return
        one.grows, one.is_only_added_to = found.grows, found.is_only_added_to
        one.at_end_of_epoch, one.late_at_end, value = found.at_end_of_epoch, found.late_at_end, one.spot.get()
        if found.is_counted and one.feeds:
            raise refusals.of_counter(one)
        if found.is_counted:
            self._catalog.leave_out(one, "it is counted beside training.steps(): use step.number")
        elif is_iterator(value) and kind_of(value) not in ("stream", "object", "generator"):
            if one.decides:
                raise refusals.of_iterator(one, value)
            self._catalog.leave_out(one, f"{name_of(value)} cannot be carried")
        elif one.decides and isinstance(value, nn.Module) and kind_of(value) != "object":
            raise refusals.of_module(one, value, is_part=is_part(catalog.parts, value))
        elif one.feeds and is_fixed(value) and len(found.place) == 1 and iteration.makes_anew(one.name, value):
            raise refusals.of_function(one.name, one.where)

    def _refuse_of_data(self, found: Found, where: str, holder: Place) -> None:
        """Refuse what data is read by, or what a step depends on. Plain values of other objects the data keeps."""
        name, owner = describe(found.place), self._spots.find(holder)
        reads = isinstance(owner.get() if owner is not None else None, (Dataset, Sampler, DataLoader))
        because = refusals.of_data(where, name, describe(holder))
        if reads or found.feeds:
            raise refusals.of_data_read_again(because)
        self._catalog.say(f"carried {name}", f"{because}: a replacement may begin without it")

    def _keep_named(self, text: str) -> None:
        place = self._spots.frames.place_of_name(text)
        one = self._catalog.keep(place)
        if one is None or (one.spot.get() is MISSING and (len(place) > 1 or not self._spots.frames.have(place[0][2]))):
            raise refusals.of_unknown_name(text)
