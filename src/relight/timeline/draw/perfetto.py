"""Tracks of slices as a trace that https://ui.perfetto.dev and chrome://tracing open. Pure: from values to JSON.

The format is Chrome's trace events. A viewer believes that the slices of a track lie beside or inside one another, so
this is made sure of here: one that begins inside another ends with it at the latest. Times are whole microseconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Slice(msgspec.Struct, frozen=True):
    """Something that took a while."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    details: Mapping[str, Any] = {}  # shown when it is selected


def encode_trace(groups: Mapping[str, Sequence[Slice]], origin_ns: int = 0) -> bytes:
    """The groups one below the other, each with its tracks in the order of their first mention, as JSON.

    What began before `origin_ns`, the trace's zero, begins there.
    """
    events: list[dict[str, Any]] = []
    for process, (group, slices) in enumerate(groups.items(), start=1):
        events.append(_named("process_name", group, process, 0))
        events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        by_track: dict[str, list[Slice]] = {}
        for one in slices:
            by_track.setdefault(one.track, []).append(one)
        for thread, (track, its) in enumerate(by_track.items(), start=1):
            events.append(_named("thread_name", track, process, thread))
            index = {"sort_index": thread}
            events.append({"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": index})
            events += _nested(its, origin_ns, process, thread)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _nested(slices: Sequence[Slice], origin_ns: int, process: int, thread: int) -> list[dict[str, Any]]:
    def microseconds(time_ns: int) -> int:
        return max(0, time_ns - origin_ns) // 1000

    events = []
    open_ends: list[int] = []  # of the slices that the next one may lie in, the innermost last
    for one in sorted(slices, key=lambda each: (each.start_ns, -each.end_ns)):
        start, end = microseconds(one.start_ns), microseconds(max(one.start_ns, one.end_ns))
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        end = min([end, *open_ends[-1:]])
        open_ends.append(end)
        event = {"ph": "X", "name": one.name, "pid": process, "tid": thread, "ts": start, "dur": end - start}
        events.append({**event, "args": dict(one.details)})
    return events


def _named(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
