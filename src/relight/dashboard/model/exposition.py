"""Prometheus' text format, version 0.0.4: a name, labels, a number. Pure.

Written here rather than by `prometheus_client`, which keeps counters of its own in the process that counts; these
numbers come from the journal, whole, with every scrape. The tests read them with that library's parser.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = re.compile(r"relight(_[a-z0-9]+)+")

Labels = Mapping[str, object]


class Exposition:
    """The text of one scrape, metric by metric."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, text: str, value: float) -> None:
        """Add a number that may go up and down."""
        self._family(name, "gauge", text, [({}, value)])

    def gauges(self, name: str, text: str, values: Iterable[tuple[Labels, float]]) -> None:
        """Add a gauge for each of several labels."""
        self._family(name, "gauge", text, values)

    def counter(self, name: str, text: str, value: float) -> None:
        """Add a number that only goes up. Its name ends in `_total`."""
        self.counters(name, text, [({}, value)])

    def counters(self, name: str, text: str, values: Iterable[tuple[Labels, float]]) -> None:
        """Add a counter for each of several labels."""
        assert name.endswith("_total"), name
        self._family(name, "counter", text, values)

    def histogram(self, name: str, text: str, bounds: Sequence[float], values: Sequence[float]) -> None:
        """Add how many of `values` are at most each bound, their sum, and their number."""
        self._head(name, "histogram", text)
        for bound in (*bounds, math.inf):
            self._sample(f"{name}_bucket", {"le": _number(bound)}, sum(value <= bound for value in values))
        self._sample(f"{name}_sum", {}, math.fsum(values))
        self._sample(f"{name}_count", {}, len(values))

    def text(self) -> str:
        """All of it."""
        return "\n".join([*self._lines, ""])

    def _family(self, name: str, kind: str, text: str, values: Iterable[tuple[Labels, float]]) -> None:
        self._head(name, kind, text)
        for labels, value in values:
            self._sample(name, labels, value)

    def _head(self, name: str, kind: str, text: str) -> None:
        assert _NAME.fullmatch(name), name
        self._lines += [f"# HELP {name} {_escape(text)}", f"# TYPE {name} {kind}"]

    def _sample(self, name: str, labels: Labels, value: float) -> None:
        pairs = ",".join(f'{key}="{_escape(str(word), quote=True)}"' for key, word in labels.items())
        self._lines.append(f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}")


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value) if isinstance(value, int) or not value.is_integer() else str(int(value))
