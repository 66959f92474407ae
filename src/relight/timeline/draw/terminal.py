"""Draws a window in the terminal: a row per rank, time to the right. Pure: from a value to lines of text.

Every activity has a letter, so that nothing depends on seeing colours; the colours are those of Okabe and Ito,
which remain distinct with any kind of colour vision. Below each row a thin line shows the version of that rank's
parameters: low and dark green before the update, high and light green after it.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

import msgspec
from rich.cells import cell_len
from rich.text import Text

from relight.timeline.model.axis import Axis, plan_axis, share_columns
from relight.timeline.model.spans import Activity, Row, Span, Strike
from relight.timeline.model.windows import Band, Window, name_steps

MAX_ROWS = 16
_LEFT = 10
_MIN_COLUMNS = 24

_STYLES = {
    Activity.FORWARD: "black on #56b4e9",
    Activity.BACKWARD: "black on #e69f00",
    Activity.BARRIER: "black on #f0e442",
    Activity.OPTIMIZER: "black on #cc79a7",
    Activity.PARKED: "white on #5a5a5a",
    Activity.OUTSIDE: "dim",
    Activity.STARTING: "italic dim",
    Activity.DONE: "dim",
    Activity.DEAD: "#d55e00",
}
_WORDS = {
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.BARRIER: "barrier",
    Activity.OPTIMIZER: "optimizer",
    Activity.OUTSIDE: "between steps",
    Activity.PARKED: "paused for a recovery",
    Activity.DEAD: "no process at this rank",
    Activity.STARTING: "process starting",
    Activity.DONE: "done",
}
_OLD = "#008700"
_NEW = "#87ff87"
_STRIKE = "bold #d55e00"
_MARK = "bold white on #5a5a5a"
_CUT = "bold reverse"
_BAND_STYLES = {
    "detect": "black on #d55e00",
    "stop": "white on #8b2f00",
    "restore": "white on #0072b2",
    "redo": "black on #9ecae1",
    "next step": "black on #9ecae1",
}

# Columns that must stay visible: X needs room for the lightning; what lies between steps may vanish.
_LEAST = {Activity.DEAD: 3, Activity.OUTSIDE: 0, Activity.STARTING: 0, Activity.DONE: 0}


class Glyphs(msgspec.Struct, frozen=True):
    """The signs to draw with. A terminal that is not UTF-8 gets plain ASCII."""

    outside: str
    lightning: str
    takes_over: str
    cut: str
    old: str
    new: str
    fill: str
    minus: str
    micro: str

    def letter(self, activity: Activity) -> str:
        return {
            Activity.STARTING: "s",
            Activity.OUTSIDE: self.outside,
            Activity.FORWARD: "F",
            Activity.BACKWARD: "B",
            Activity.BARRIER: "|",
            Activity.OPTIMIZER: "O",
            Activity.PARKED: "p",
            Activity.DONE: "d",
            Activity.DEAD: "X",
        }[activity]


UNICODE = Glyphs(outside="·", lightning="⚡", takes_over="»", cut="≈", old="▁", new="▔", fill="─", minus="−", micro="µ")
ASCII = Glyphs(outside=".", lightning="!", takes_over=">", cut="~", old="_", new='"', fill="-", minus="-", micro="u")


def draw(window: Window, width: int, glyphs: Glyphs = UNICODE, max_rows: int = MAX_ROWS) -> list[Text]:
    """The figure, line by line, each at most `width` cells wide."""
    columns = max(_MIN_COLUMNS, width - _LEFT)
    rows = window.choose_rows(max_rows)
    hidden = len(window.rows) - len(rows)
    axis = plan_axis(window.start_ns, window.end_ns, columns, _changes(window, rows))
    lines = [_line("step", _step_labels(rows, axis))]
    if window.strikes:
        lines.append(_line("failure", place_labels(_strike_labels(window.strikes, axis, glyphs), columns, _STRIKE)))
    if window.bands:
        lines.append(_line("recovery", _band_line(window.bands, axis, glyphs)))
    for row in rows:
        lines += _rank_lines(row, window, axis, glyphs)
    if hidden:
        ranks = "1 more rank is" if hidden == 1 else f"{hidden} more ranks are"
        lines.append(Text(f"{ranks} not shown.", style="dim"))
    lines.append(_line("time", _time_labels(window, axis, glyphs)))
    return lines


def legend(width: int, glyphs: Glyphs = UNICODE) -> list[Text]:
    """Return the legend of letters and lines, in lines of at most `width` cells."""
    entries = [
        Text.assemble((sign, style), " ", words)
        for sign, style, words in (
            *((glyphs.letter(activity), _STYLES[activity], words) for activity, words in _WORDS.items()),
            (glyphs.lightning, _STRIKE, "failure"),
            (glyphs.takes_over, _MARK, "replacement takes over"),
            (glyphs.cut, _CUT, "time shortened"),
            (glyphs.old * 2, _OLD, "parameters before the update (version i)"),
            (glyphs.new * 2, _NEW, "after it (i+1)"),
        )
    ]
    return side_by_side(entries, width)


def side_by_side(entries: Iterable[Text], width: int) -> list[Text]:
    """Return the entries of a legend in lines of at most `width` cells."""
    lines = [Text()]
    for entry in entries:
        if lines[-1] and lines[-1].cell_len + 3 + entry.cell_len > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1] else "").append_text(entry)
    return lines


def duration(seconds: float, minus: str = "-", micro: str = "µ") -> str:
    """A time in the unit that people would use."""
    sign, value = (minus, -seconds) if seconds < 0 else ("", seconds)
    if value < 0.0000005:
        return "0"
    for limit, factor, unit in ((0.0009995, 1e6, f"{micro}s"), (0.9995, 1e3, "ms"), (99.95, 1.0, "s")):
        if value < limit:
            scaled = value * factor
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{sign}{scaled:.{digits}f} {unit}"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{sign}{minutes} min {rest:02d} s"
    return f"{sign}{minutes // 60} h {minutes % 60:02d} min"


# --- rows -------------------------------------------------------------------------------------------------------
def _changes(window: Window, rows: Sequence[Row]) -> list[int]:
    """Return the times at which something changes; empty if nothing was recovered: then the figure is to scale."""
    if not window.bands:
        return []
    times = [time for row in rows for span in row.spans for time in (span.start_ns, span.end_ns)]
    times += [strike.at_ns for strike in window.strikes]
    for band in window.bands:
        times += band.times[:-1]
    return times


def _rank_lines(row: Row, window: Window, axis: Axis, glyphs: Glyphs) -> list[Text]:
    cells = _cells(row.spans, axis)
    return [
        _line(f"rank {row.rank}", _phase_line(cells, row.rank, window, axis, glyphs)),
        _line(
            "",
            _version_line(
                [None if span is None else window.shown_version(span) for span in cells], window.base_version, glyphs
            ),
        ),
    ]


def _phase_line(cells: Sequence[Span | None], rank: int, window: Window, axis: Axis, glyphs: Glyphs) -> Text:
    cut_columns = {axis.column((piece.start_ns + piece.end_ns) // 2) for piece in axis.cuts}
    text = Text()
    before: Span | None = None
    for column, span in enumerate(cells):
        if text.cell_len > column:  # covered by a wide sign
            continue
        if span is None:
            text.append(" ")
        elif span is not before and _was_struck(span, rank, window):
            wide = column + cell_len(glyphs.lightning) > len(cells)
            text.append(ASCII.lightning if wide else glyphs.lightning, _STRIKE)
        elif column in cut_columns:
            text.append(glyphs.cut, _CUT)
        elif span is not before and before is not None and before.activity is Activity.DEAD:
            text.append(glyphs.takes_over, _MARK)
        else:
            text.append(glyphs.letter(span.activity), _STYLES[span.activity])
        before = span
    return text


def _version_line(versions: Sequence[int | None], base_version: int, glyphs: Glyphs) -> Text:
    text = Text()
    for version, group in groupby(versions):
        length = len(list(group))
        if version is None:
            text.append(" " * length)
            continue
        style, sign = (_OLD, glyphs.old) if version <= base_version else (_NEW, glyphs.new)
        label = f"v{version}"
        text.append((label if len(label) < length else "").ljust(length, sign), style)
    return text


def _cells(spans: Sequence[Span], axis: Axis) -> list[Span | None]:
    """The span of each column."""
    stretches: list[Span | None] = []
    edges = [0.0]
    for span in spans:
        start, end = axis.coordinate(span.start_ns), axis.coordinate(span.end_ns)
        if start > edges[-1]:
            stretches.append(None)
            edges.append(start)
        stretches.append(span)
        edges.append(end)
    if edges[-1] < axis.columns:
        stretches.append(None)
        edges.append(float(axis.columns))
    least = [0 if stretch is None else _LEAST.get(stretch.activity, 1) for stretch in stretches]
    widths = share_columns(edges, least)
    return [stretch for stretch, width in zip(stretches, widths, strict=True) for _ in range(width)]


def _was_struck(span: Span, rank: int, window: Window) -> bool:
    return span.activity is Activity.DEAD and any(
        strike.rank == rank and strike.at_ns == span.start_ns for strike in window.strikes
    )


# --- lines above and below --------------------------------------------------------------------------------------
def _line(name: str, content: Text) -> Text:
    return named_line(name, content, _LEFT, "bold" if name.startswith("rank") else "dim")


def named_line(name: str, content: Text, left: int, style: str = "dim") -> Text:
    """Return a line of a figure with its name, which takes `left` columns with the space after it."""
    line = Text(no_wrap=True, overflow="crop", end="\n")
    line.append(name.ljust(left - 1)[: left - 1] + " ", style)
    line.append_text(content)
    return line


def place_labels(labels: Sequence[tuple[int, str]], columns: int, style: str = "") -> Text:
    """Texts at columns, from left to right; one that does not fit beside its neighbours is moved, or left out."""
    text = Text()
    free = 0
    for index, (column, label) in enumerate(labels):
        length = cell_len(label)
        later = labels[index + 1][0] - 1 if index + 1 < len(labels) else columns
        start = max(free, min(column, columns - length))
        if start + length > columns or (start > column and start + length > later):
            continue
        text.append(" " * (start - cell_len(text.plain)))
        text.append(label, style)
        free = start + length + 1
    return text


def _step_labels(rows: Sequence[Row], axis: Axis) -> Text:
    return place_labels([(axis.column(start), name) for start, name in name_steps(rows)], axis.columns)


def _strike_labels(strikes: Sequence[Strike], axis: Axis, glyphs: Glyphs) -> list[tuple[int, str]]:
    """One lightning for all failures that fall into the same few columns."""
    groups: list[tuple[int, list[str]]] = []
    for strike in sorted(strikes, key=lambda s: (s.at_ns, s.number)):
        column = axis.column(strike.at_ns)
        name = str(strike.rank) if strike.rank >= 0 else ("standby" if strike.process else strike.kind)
        if groups and column - groups[-1][0] < 4:
            groups[-1][1].append(name)
        else:
            groups.append((column, [name]))
    return [(column, glyphs.lightning + ",".join(names)) for column, names in groups]


def _band_line(bands: Sequence[Band], axis: Axis, glyphs: Glyphs) -> Text:
    text = Text()
    for band in sorted(bands, key=lambda b: b.struck_ns):
        edges = [axis.coordinate(time) for time in band.times]
        least = [int(start < end) for start, end in pairwise(band.times)]
        column = min(int(edges[0] + 0.5), axis.columns)
        text.append(" " * (column - len(text)))
        skip = len(text) - column  # the band before reaches into this one
        names = ("detect", "stop", "restore", "redo" if band.repeats else "next step")
        for name, width in zip(names, share_columns(edges, least), strict=True):
            room = width - min(skip, width)
            skip -= width - room
            text.append(_boxed(name, room, glyphs), _BAND_STYLES[name])
    return text


def _boxed(name: str, width: int, glyphs: Glyphs) -> str:
    """`name` in a bracket of `width`, with a line after it; or as much of it as fits."""
    return name[:width] if width < 2 else ("[" + name).ljust(width, glyphs.fill)[:width]


def _time_labels(window: Window, axis: Axis, glyphs: Glyphs) -> Text:
    """Label zero, the distance to the edges, and the true length of what was shortened."""

    def label(time_ns: int) -> str:
        return duration((time_ns - window.zero_ns) / 1e9, glyphs.minus, glyphs.micro)

    labels = [(0, label(window.start_ns))]
    if window.start_ns < window.zero_ns < window.end_ns:
        labels.append((axis.column(window.zero_ns), "0"))
    for piece in axis.cuts:
        length = duration((piece.end_ns - piece.start_ns) / 1e9, micro=glyphs.micro)
        labels.append((int(piece.first_column) + 2, f"{glyphs.cut} {length} {glyphs.cut}"))
    last = label(window.end_ns)
    labels.append((axis.columns - cell_len(last), last))
    return place_labels(sorted(labels), axis.columns, "dim")
