"""Marks of what was looked at part by part, put together: what stood in a place goes back with all that it held."""

from collections.abc import Callable, Mapping
from typing import Any

from relight.training.carried.code.refs import Place
from relight.training.carried.finding.places import step_to_item
from relight.training.state.values.kinds import attributes_of, kind_of
from relight.training.state.values.marks import DEEPEST, Mark


class Wholes:
    """Marks by place; an object that several names reach was looked into at one of its places only."""

    def __init__(
        self,
        marks: Mapping[Place, Any],
        attributes: Mapping[Place, frozenset[str]],
        home_of: Callable[[Any], Place | None],
    ) -> None:
        """`attributes`: of the objects at these places. `home_of`: the place where an object was looked into."""
        self._marks, self._attributes, self._home_of = marks, attributes, home_of

    def of(self, mark: Any, depth: int = 0) -> Any:
        """Return a mark with those of the attributes and members that were looked at by themselves."""
        if type(mark) is not Mark or depth > DEEPEST or (home := self._home_of(mark.value)) is None:
            return mark
        value = mark.value

        def part(step: tuple[str, str, str], otherwise: Any) -> Any:
            there = (*home, step)
            return self.of(self._marks[there], depth + 1) if there in self._marks else Mark("opaque", otherwise, None)

        if mark.kind == "opaque" and kind_of(value) == "object":
            now, names = attributes_of(value), sorted(self._attributes.get(home, ()))
            return Mark("object", value, {name: part(("attribute", name, ""), now.get(name)) for name in names})
        if mark.kind == "members" and isinstance(value, dict):
            parts = [(key, part(step, one)) for key, one in mark.saved if (step := step_to_item(key)) is not None]
            return Mark("dict", value, parts)
        if mark.kind == "members":
            return Mark(kind_of(value), value, [part(("item", "int", str(n)), one) for n, one in enumerate(mark.saved)])
        return mark
