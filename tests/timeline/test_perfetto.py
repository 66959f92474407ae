"""Traces for Perfetto: what a viewer relies on holds whatever the slices are."""

from collections import defaultdict
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from relight.timeline.draw.perfetto import Slice, encode_trace


def events_of(trace: bytes) -> list[dict[str, Any]]:
    found = msgspec.json.decode(trace)
    assert found.keys() == {"traceEvents", "displayTimeUnit"}
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


def names_of(trace: bytes) -> dict[tuple[int, int], str]:
    """(process, thread) -> name; thread 0 is the process itself."""
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events_of(trace)
        if event["name"] in ("process_name", "thread_name")
    }


def slices_by_track(trace: bytes) -> dict[tuple[str, str], list[dict[str, Any]]]:
    names = names_of(trace)
    found = defaultdict(list)
    for event in events_of(trace):
        if event["ph"] == "X":
            found[names[event["pid"], 0], names[event["pid"], event["tid"]]].append(event)
    return dict(found)


def assert_nested(events: list[dict[str, Any]]) -> None:
    """In the order of their starts, each begins after the end of the one before, or lies inside it."""
    open_ends: list[int] = []
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        assert event["dur"] >= 0
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], event
        open_ends.append(end)


def test_groups_tracks_and_slices() -> None:
    trace = encode_trace(
        {
            "first": [Slice("b", "outer", 1_000, 9_999, {"bytes": 5}), Slice("a", "x", 2_000, 3_000)],
            "second": [Slice("b", "y", 500, 4_000)],
        },
        1_000,
    )
    assert names_of(trace) == {(1, 0): "first", (1, 1): "b", (1, 2): "a", (2, 0): "second", (2, 1): "b"}
    tracks = slices_by_track(trace)
    assert tracks["first", "b"] == [
        {"ph": "X", "name": "outer", "pid": 1, "tid": 1, "ts": 0, "dur": 8, "args": {"bytes": 5}}
    ]
    assert [(e["ts"], e["dur"]) for e in tracks["first", "a"]] == [(1, 1)]
    assert [(e["ts"], e["dur"]) for e in tracks["second", "b"]] == [(0, 3)], "it began before the trace did"


def test_nothing_is_a_trace_too() -> None:
    assert events_of(encode_trace({})) == []
    assert slices_by_track(encode_trace({"empty": []})) == {}


def test_what_hangs_over_is_cut_off() -> None:
    trace = encode_trace({"g": [Slice("t", "outer", 0, 10_000), Slice("t", "over", 8_000, 20_000)]})
    assert [(e["name"], e["ts"], e["dur"]) for e in slices_by_track(trace)["g", "t"]] == [
        ("outer", 0, 10),
        ("over", 8, 2),
    ]


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(-5, 20_000)), max_size=20), st.integers(0, 5_000))
def test_slices_are_nested_whatever_they_were(spans: list[tuple[int, int]], origin_ns: int) -> None:
    slices = [Slice("t", str(index), start, end) for index, (start, end) in enumerate(spans)]
    events = slices_by_track(encode_trace({"g": slices}, origin_ns)).get(("g", "t"), [])
    assert sorted(event["name"] for event in events) == sorted(each.name for each in slices)
    assert_nested(events)
    assert all(event["ts"] >= 0 for event in events)
