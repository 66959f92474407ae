"""The figure of an update: golden for the reference schedule, and honest in any width."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from relight.timeline.draw.terminal import ASCII, UNICODE, Glyphs
from relight.timeline.draw.weights import MAX_DEVICES, Doing, Figure, Use, draw_update, legend_of_update
from relight.transfer.plan.cost import Costs, simulate
from relight.transfer.plan.plan import Bucket
from relight.transfer.plan.schedule import Form, make_schedule
from relight.weights.figure import drawn_buckets, figure_of
from tests.timeline.test_terminal import same_as_file


def make_figure(
    form: Form, *, devices: int, buckets: int, rounds: int, width: int = 100, from_host: bool = False, h: float = 1.0
) -> Figure:
    schedule = make_schedule(form, devices=devices, buckets=buckets, from_host=from_host)
    full = tuple(Bucket(index, 64, ()) for index in range(buckets))
    return figure_of(schedule, simulate(schedule, full, Costs(h, 1.0, 1.0, bucket_bytes=64)), rounds, width)


def drawn(figure: Figure, width: int = 100, glyphs: Glyphs = UNICODE, legend: bool = False) -> str:
    """The figure as a terminal without colour shows it."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    for line in [*draw_update(figure, width, glyphs), *(legend_of_update(width, glyphs) if legend else [])]:
        assert line.cell_len <= width
        console.print(line, highlight=False)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def rows_of(text: str) -> dict[tuple[str, str], str]:
    """(device, buffer) -> what is drawn there."""
    rows = {}
    device = ""
    for line in text.splitlines():
        device = line[:4].strip() if line.startswith("D") else device
        if device and line[5:8].strip() in ("H2D", "I0", "I1"):
            rows[device, line[5:8].strip()] = line[10:]
    return rows


# --- the reference schedule --------------------------------------------------------------------------------------
def test_the_reference_schedule() -> None:
    """Four devices, a round of four buckets: H2D, then five slots, as in the design's table."""
    same_as_file(
        drawn(make_figure(Form.TWO_STAGE, devices=4, buckets=4, rounds=1, width=82), 82, legend=True), "weights"
    )


def test_the_next_rounds_copies_wait_in_two_stages_and_do_not_in_three() -> None:
    same_as_file(
        drawn(make_figure(Form.TWO_STAGE, devices=2, buckets=8, rounds=2), 90)
        + drawn(make_figure(Form.THREE_STAGE, devices=2, buckets=8, rounds=2), 90),
        "weights-forms",
    )


def test_from_host_there_is_no_buffer_for_copies() -> None:
    text = drawn(make_figure(Form.TWO_STAGE, devices=2, buckets=4, rounds=2, from_host=True), 70, ASCII)
    rows = rows_of(text)
    assert rows.keys() == {("D0", "I0"), ("D0", "I1"), ("D1", "I0"), ("D1", "I1")}
    assert rows["D0", "I0"].startswith("S0SSS")
    assert rows["D1", "I0"].startswith("T0TTT")
    assert rows["D1", "I1"].lstrip().startswith("S1SSS")


# --- whatever the schedule ---------------------------------------------------------------------------------------
@given(
    st.sampled_from(Form),
    st.integers(1, 12),
    st.integers(0, 30),
    st.integers(0, 5),
    st.integers(1, 200),
    st.sampled_from([UNICODE, ASCII]),
)
def test_every_buffer_has_a_row_of_the_same_length(
    form: Form, devices: int, buckets: int, rounds: int, width: int, glyphs: Glyphs
) -> None:
    figure = make_figure(form, devices=devices, buckets=buckets, rounds=rounds, width=width)
    wide = max(width, 34)
    lines = draw_update(figure, wide, glyphs)
    assert all(line.cell_len <= wide for line in lines)
    text = "\n".join(line.plain for line in lines)
    assert text.isascii() == (glyphs is ASCII) or "·" not in text
    rows = rows_of(text)
    assert len(rows) == 3 * min(devices, MAX_DEVICES)
    assert all(len(row) == wide - 10 for row in rows.values())
    assert ("not shown" in text) == (devices > MAX_DEVICES)


@given(st.sampled_from(Form), st.integers(1, 4), st.integers(1, 12), st.integers(1, 3))
def test_every_bucket_shown_is_seen_in_every_stage(form: Form, devices: int, buckets: int, rounds: int) -> None:
    figure = make_figure(form, devices=devices, buckets=buckets, rounds=rounds, width=400)
    rows = rows_of("\n".join(line.plain for line in draw_update(figure, 400)))
    for bucket in range(min(buckets, rounds * devices)):
        for device in range(devices):
            cells = rows[f"D{device}", f"I{bucket % 2}"]
            assert f"R{bucket}R" in cells
            assert (f"S{bucket}S" in cells) == (device == bucket % devices)
            assert (f"T{bucket}T" in cells) == (device != bucket % devices)
            assert (f"H{bucket}H" in rows[f"D{device}", "H2D"]) == (device == bucket % devices)


def test_what_goes_on_is_cut_off_with_a_mark() -> None:
    figure = make_figure(Form.TWO_STAGE, devices=2, buckets=8, rounds=1, h=5.0)
    assert figure.end_seconds == 8.0
    rows = rows_of(drawn(figure, 90))
    assert rows["D0", "H2D"].endswith("»")
    assert "H2" in rows["D0", "H2D"]
    assert rows["D0", "I1"].endswith("RR")
    assert rows_of(drawn(figure, 90, ASCII))["D0", "H2D"].endswith(">")


def test_a_short_use_stays_visible() -> None:
    uses = (Use(0, 0, Doing.RELOAD, 7, 0.5, 0.5001), Use(0, 0, Doing.SOURCE, 8, 0.6, 1.0))
    row = rows_of(drawn(Figure(1, ("I0",), uses, 1.0), 50))["D0", "I0"]
    assert row.count("R") == 1
    assert "S8SSS" in row


def test_uses_that_take_no_time_are_left_out() -> None:
    figure = make_figure(Form.SERIAL, devices=1, buckets=1, rounds=1, h=0.0)
    assert "H0" not in drawn(figure)


def test_each_kind_has_its_own_letter_and_its_own_colour() -> None:
    console = Console(record=True, width=300, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in legend_of_update(300):
        console.print(line)
    text = console.export_text(styles=True)
    assert all(f"{letter}{letter}" in text for letter in "HSTR·")
    colours = {part.split("m")[0] for part in text.split("48;2;")[1:]}
    assert len(colours) == 4


@pytest.mark.parametrize("width", [20, 40, 80])
def test_the_legend_fits(width: int) -> None:
    lines = legend_of_update(max(width, 42))
    assert all(line.cell_len <= max(width, 42) for line in lines)


def test_a_wide_group_shows_as_many_buckets_as_can_be_read() -> None:
    figure = make_figure(Form.TWO_STAGE, devices=64, buckets=128, rounds=2, width=100)
    assert drawn_buckets(figure) == 20
    assert "56 more devices are not shown." in drawn(figure)
