"""Views of an update that was measured, on updates that are made up: summary, figure, trace, progress."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from relight.timeline.draw.terminal import ASCII, UNICODE
from relight.timeline.draw.weights import Doing, Figure, Use, draw_update
from relight.transfer.plan.timings import measure, plan_again
from relight.transfer.plan.update.result import Published, Stage, UpdateProgress
from relight.weights import screen as weights_screen
from relight.weights.figure import MEASURED_WORDS, drawn_buckets, figure_of_measured, print_figure
from relight.weights.screen import Screen, describe_progress
from relight.weights.summary import facts_of, printable, table_of
from relight.weights.trace import trace_of
from tests.timeline.test_perfetto import assert_nested, slices_by_track
from tests.timeline.test_terminal import same_as_file
from tests.transfer.made_up import (
    ABANDONED,
    ALL,
    BUCKET_BYTES,
    DAMAGED,
    DROPPED,
    NOTHING,
    ONE,
    USUAL,
    at,
    buckets_of,
    published,
    reload,
    write,
)

EVERY = pytest.mark.parametrize("result", ALL.values(), ids=ALL)


def figure(result: Published, width: int = 80) -> Figure:
    buckets = buckets_of(result.buckets)
    return figure_of_measured(result, *plan_again(measure(result, buckets), buckets, BUCKET_BYTES), width)


def rows(result: Published, width: int = 80) -> list[str]:
    """planned I0, planned I1, measured I0, measured I1."""
    lines = [line.plain for line in draw_update(figure(result, width), width)]
    assert [line[:11] for line in lines[:4]] == ["planned  I0", "         I1", "measured I0", "         I1"]
    return [line[14:] for line in lines[:4]]


def facts(result: Published) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name = ""
    for label, words in facts_of(result, measure(result, buckets_of(result.buckets))):
        name = label or name
        found.setdefault(name, []).append(words)
    return found


def trace(result: Published) -> dict[tuple[str, str], list[dict[str, Any]]]:
    buckets = buckets_of(result.buckets)
    measured = measure(result, buckets)
    return slices_by_track(trace_of(result, measured, buckets, *plan_again(measured, buckets, BUCKET_BYTES)))


# --- summary ------------------------------------------------------------------------------------------------------
def test_the_summary_of_the_usual_update() -> None:
    assert facts(USUAL) == {
        "update": ["version 7, 192 B in 3 buckets of 64 B"],
        "total": ["10 s: 1 s to ask everyone, 7 s to move every bucket, 2 s until every engine answers with it"],
        "written": ["by publisher: 2 buckets, 128 B in 2 s, 64 B/s", "by other: 1 bucket, 64 B in 1 s, 64 B/s"],
        "reloaded": ["by a: 3 buckets, 192 B in 3 s, 64 B/s", "by b: 3 buckets, 192 B in 6 s, 32 B/s"],
        "overlap": ["engines reloaded during 67% of the time of writing"],
        "have it": ["a, b"],
    }


def test_the_summary_of_nothing() -> None:
    found = facts(NOTHING)
    assert found.keys() == {"update", "total", "have it", "failed"}
    assert found["have it"] == ["no engine"]
    assert found["failed"] == ["there is no engine"]


def test_the_summary_says_who_has_not_got_it_and_why() -> None:
    assert facts(DROPPED)["have not"] == ["b: no answer for 30 s"]
    assert facts(ABANDONED)["failed"] == ["no source is left (publisher: OSError: gone)"]


def test_the_summary_says_what_was_done_again() -> None:
    found = facts(DAMAGED)
    assert found["written"] == ["by publisher: 3 buckets, 1 of them again, 192 B in 3 s, 64 B/s"]
    assert found["reloaded"][1] == "by b: 4 buckets, 2 of them again, 256 B in 4 s, 64 B/s"


def test_one_bucket_and_no_time() -> None:
    assert facts(ONE)["update"] == ["version 7, 64 B in 1 bucket"]
    instant = published([write(0, 0, 0), reload(0, 0, 0)], buckets=1, seconds=0.0)
    assert facts(instant)["written"] == ["by publisher: 1 bucket, 64 B in 0 s"]


def test_names_from_elsewhere_do_not_move_the_cursor() -> None:
    name = "e\x1b[2J\r\n\u202eé"
    assert printable(name, "utf-8") == "e?[2J???é"
    assert printable(name, "ascii") == "e?[2J????"
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    result = published((), buckets=0, seconds=1.0, engines=(name,), dropped={name: name}, error=name)
    with console.capture() as shown:
        console.print(table_of(facts_of(result, measure(result, ())), "ascii"))
    lines = shown.get()
    assert lines.isascii()
    assert "\r" not in lines
    assert "\x1b[2J" not in lines


# --- figure -------------------------------------------------------------------------------------------------------
@EVERY
def test_the_figure_of(result: Published, request: pytest.FixtureRequest) -> None:
    lines = draw_update(figure(result), 80)
    text = "\n".join(line.plain.rstrip() for line in lines) + "\n"
    same_as_file(text, f"measured-{request.node.callspec.id}")


@EVERY
@pytest.mark.parametrize("width", [38, 60, 200])
def test_planned_and_measured_share_one_axis(result: Published, width: int) -> None:
    lines = draw_update(figure(result, width), width, ASCII)
    assert {line.cell_len for line in lines} == {width}
    assert all(line.plain.isascii() for line in lines)


def test_no_stages_make_no_figure() -> None:
    assert figure(NOTHING).end_seconds == 0
    assert figure(published((), buckets=0, seconds=1.0)).uses == ()


def test_a_bucket_is_reloaded_from_the_first_start_to_the_last_end() -> None:
    reloads = [use for use in measured_uses(USUAL) if use.doing is Doing.RELOAD]
    assert sorted((use.bucket, use.start_seconds, use.end_seconds) for use in reloads) == [
        (0, 1.0, 3.0),
        (1, 3.0, 5.0),
        (2, 5.0, 7.0),
    ]


def test_a_bucket_that_was_written_again_is_drawn_again() -> None:
    uses = [use for use in measured_uses(DAMAGED) if use.bucket == 1]
    assert [(use.doing, use.row, use.start_seconds, use.end_seconds) for use in uses] == [
        (Doing.SOURCE, 1, 1.0, 2.0),
        (Doing.HELD, 1, 2.0, 2.0),
        (Doing.RELOAD, 1, 2.0, 4.0),
        (Doing.HELD, 1, 4.0, 5.0),
        (Doing.SOURCE, 1, 5.0, 6.0),
        (Doing.HELD, 1, 6.0, 6.0),
        (Doing.RELOAD, 1, 6.0, 7.0),
    ]


def test_what_nobody_read_stays_to_the_end() -> None:
    assert rows(ABANDONED)[3].rstrip().endswith("·")
    assert not any(use.doing is Doing.RELOAD and use.bucket == 1 for use in measured_uses(ABANDONED))


def test_a_faster_update_cuts_its_plan_off() -> None:
    """Both means are 3 s, so 9 s are planned; but the long write ran beside the long reload."""
    result = published([write(0, 0, 1), reload(0, 1, 6), write(1, 1, 6), reload(1, 6, 7)], buckets=2, seconds=7.0)
    assert figure(result).end_seconds == 7.0
    assert rows(result)[1].endswith("»")


def test_a_wait_that_would_fill_the_figure_is_shortened() -> None:
    lines = [line.plain for line in draw_update(figure(DROPPED), 80)]
    (column,) = {line.index("≈") for line in lines[:4]}
    assert lines[4].index("≈ 28.0 s ≈") < column
    assert all(f"S{bucket}SSS" in lines[2 + bucket % 2] for bucket in range(3))
    assert "≈" not in "".join(rows(USUAL))


_SECONDS = st.floats(0, 300)


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from([write, reload]), st.integers(-1, 8), _SECONDS, _SECONDS), max_size=30),
    st.sampled_from([38, 80]),
)
@example(  # a label that moved would leave no room for the last one
    2, [(write, 1, 55.0, 0.0), (reload, 0, 55.0, 204.0), (reload, 0, 251.0, 75.0), (reload, 1, 82.0, 102.0)], 80
)
def test_whatever_was_measured_can_be_shown(
    buckets: int, stages: list[tuple[Callable[[int, float, float], Stage], int, float, float]], width: int
) -> None:
    made = [make(bucket, start, start + length) for make, bucket, start, length in stages]
    result = published(made, buckets=buckets, seconds=600.0)
    lines = draw_update(figure(result, width), width, ASCII)
    assert {line.cell_len for line in lines} == {width}
    assert all(line.plain.isascii() for line in lines)
    for events in trace(result).values():
        assert_nested(events)
    assert facts(result)["have it"] == ["a"]


def test_only_as_many_buckets_as_can_be_told_apart() -> None:
    stages: list[Stage] = []
    for bucket in range(100):
        stages += [write(bucket, bucket, bucket + 1), reload(bucket, bucket + 1, bucket + 2)]
    result = published(stages, buckets=100, seconds=101.0)
    drawn = figure(result, 80)
    assert drawn_buckets(drawn) == 16
    assert drawn.end_seconds == 17.0
    assert {use.bucket for use in drawn.uses if use.device == 0} == set(range(16))


def test_the_legend_has_only_what_occurs() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    with console.capture() as shown:
        print_figure(figure(USUAL), console, MEASURED_WORDS)
    assert "a source writes the bucket" in shown.get()
    assert "target" not in shown.get()


def measured_uses(result: Published) -> list[Use]:
    return [use for use in figure(result).uses if use.device == 1]


# --- trace --------------------------------------------------------------------------------------------------------
@EVERY
def test_every_track_is_nested(result: Published) -> None:
    for events in trace(result).values():
        assert_nested(events)


def test_a_track_for_each_source_and_each_engine_and_the_plan() -> None:
    found = trace(USUAL)
    planned = "planned, with the measured means"
    assert list(found) == [
        ("measured", "update"),
        ("measured", "source publisher"),
        ("measured", "source other"),
        ("measured", "engine a"),
        ("measured", "engine b"),
        (planned, "sources"),
        (planned, "engines"),
    ]
    assert shown(found["measured", "update"]) == [
        ("version 7", 0.0, 10.0),
        ("ask", 0.0, 1.0),
        ("move", 1.0, 8.0),
        ("take", 8.0, 10.0),
    ]
    assert shown(found["measured", "source publisher"]) == [("write 0", 1.0, 2.0), ("write 2", 4.0, 5.0)]
    assert shown(found["measured", "engine b"]) == [
        ("reload 0", 2.0, 4.0),
        ("reload 1", 4.0, 6.0),
        ("reload 2", 6.0, 8.0),
        ("take version 7", 8.0, 8.5),
    ]
    assert found["measured", "source other"][0]["args"] == {"bucket": 1, "buffer": "I1", "bytes": 64}
    assert shown(found[planned, "sources"])[0] == ("write 0", 1.0, 2.0), "it begins where the update began to move"
    assert len(found[planned, "engines"]) == 3


def test_the_trace_says_who_was_dropped_and_what_went_wrong() -> None:
    assert trace(DROPPED)["measured", "update"][0]["args"] == {
        "bytes": 192,
        "buckets": 3,
        "engines": "a",
        "not b": "no answer for 30 s",
    }
    assert trace(ABANDONED)["measured", "update"][0]["args"]["error"].startswith("no source is left")


def test_an_engine_that_tells_nonsense_does_not_break_the_trace() -> None:
    """Times that overlap, and buckets that do not exist."""
    lies = [reload(0, 2, 9, "b"), reload(1, 3, 20, "b"), Stage("reload", 10**15, 0, "b", at(0), at(99))]
    result = published([*USUAL.stages, *lies], buckets=3, seconds=10.0)
    events = trace(result)["measured", "engine b"]
    assert len(events) == 6
    assert_nested(events)


def shown(events: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events]


# --- progress -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("held_bytes", "seconds", "words"),
    [
        (0, 5.0, "0 B of 25.6 MiB"),
        (2**20, 0.0, "1.0 MiB of 25.6 MiB"),
        (round(12.8 * 2**20), 2.0, "12.8 MiB of 25.6 MiB, 6.4 MiB/s, 2 s left"),
        (2**20, 10.0, "1.0 MiB of 25.6 MiB, 102.4 KiB/s, 4 min 06 s left"),
        (round(25.5 * 2**20), 2.0, "25.5 MiB of 25.6 MiB, 12.8 MiB/s, 1 s left"),
    ],
)
def test_how_far_it_is(held_bytes: int, seconds: float, words: str) -> None:
    progress = UpdateProgress(held_bytes=held_bytes, total_bytes=round(25.6 * 2**20))
    assert describe_progress(progress, seconds) == words


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    for here in (0, 0, 1, 1, 2):
        screen.waiting(here, 3, "engine")
    progress = UpdateProgress(held_buckets=1, total_buckets=2, held_bytes=2**20, total_bytes=2**21)
    screen.moving(progress, 1.0)
    screen.taking(1, 3)
    assert capsys.readouterr().err.splitlines() == [
        "relight: waiting: 0 of 3 engines are here",
        "relight: waiting: 1 of 3 engines are here",
        "relight: waiting: 2 of 3 engines are here",
    ]
    monkeypatch.setattr(weights_screen, "PLAIN_SECONDS", 0.0)
    screen.moving(progress, 1.0)
    screen.taking(1, 3)
    screen.close()
    assert capsys.readouterr() == (
        "",
        "relight: publishing: 1.0 MiB of 2.0 MiB, 1.0 MiB/s, 1 s left\n"
        "relight: publishing: in every engine; 1 of 3 answer with it\n",
    )


def test_the_figure_names_its_rows_with_any_glyphs() -> None:
    for glyphs in (UNICODE, ASCII):
        assert draw_update(figure(USUAL), 80, glyphs)[2].plain.startswith("measured I0")
