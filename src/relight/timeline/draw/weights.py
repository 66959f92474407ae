"""Draws a weight update in the terminal: for each device a row per buffer, time to the right. Pure.

Each use of a buffer is filled with a letter of its own and begins with the number of its bucket, so that nothing
depends on seeing colours; the colours are those of Okabe and Ito, as in the figures of training.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

import msgspec
from rich.cells import cell_len
from rich.text import Text

from relight.timeline.draw.terminal import UNICODE, Glyphs, duration, named_line, place_labels, side_by_side
from relight.timeline.model.axis import Axis, plan_axis, share_columns

MAX_DEVICES = 8
_LEFT = 10  # columns beside the rows, with names as short as D0
_INDENT = 4  # of them for the device
_MIN_COLUMNS = 24


class Doing(StrEnum):
    """One use of a buffer."""

    H2D = "host-to-device copy"
    SOURCE = "broadcast, this device is the source"
    TARGET = "broadcast, this device is a target"
    RELOAD = "reload by the engine"
    HELD = "still to be read"


_LETTERS = {Doing.H2D: "H", Doing.SOURCE: "S", Doing.TARGET: "T", Doing.RELOAD: "R"}
_STYLES = {
    Doing.H2D: "black on #56b4e9",
    Doing.SOURCE: "black on #e69f00",
    Doing.TARGET: "black on #f0e442",
    Doing.RELOAD: "black on #009e73",
    Doing.HELD: "dim",
}

_WORDS: Mapping[Doing, str] = MappingProxyType({doing: doing.value for doing in Doing})
_CUT = "bold reverse"  # as in the figures of training


class Use(msgspec.Struct, frozen=True, array_like=True):
    """One bucket in one buffer of one device, for some time."""

    device: int
    row: int  # index into the figure's rows
    doing: Doing
    bucket: int
    start_seconds: float
    end_seconds: float


class Figure(msgspec.Struct, frozen=True):
    """The content of a figure: from second 0 to `end_seconds`, where longer uses are cut off."""

    devices: int
    rows: tuple[str, ...]  # the buffers of each device
    uses: tuple[Use, ...]
    end_seconds: float
    marks: tuple[tuple[float, str], ...] = ()  # names of moments, above the rows
    names: tuple[str, ...] = ()  # of the devices; D0, D1 and so on if there are none
    is_shortened: bool = False  # a stretch in which nothing changes, and which would fill the figure, is cut short


def draw_update(figure: Figure, width: int, glyphs: Glyphs = UNICODE) -> list[Text]:
    """The figure, line by line, each at most `width` cells wide."""
    shown = min(figure.devices, MAX_DEVICES)
    names = figure.names[:shown] or tuple(f"D{device}" for device in range(shown))
    indent = max(_INDENT, *map(cell_len, names)) if names else _INDENT
    left = indent + _LEFT - _INDENT
    columns = max(_MIN_COLUMNS, width - left)
    edges = (at for use in figure.uses for at in (use.start_seconds, use.end_seconds))
    axis = plan_axis(0, _ns(figure.end_seconds), columns, map(_ns, edges) if figure.is_shortened else ())
    lines = []
    if figure.marks:
        marks = [(axis.column(_ns(at)), name) for at, name in figure.marks]
        lines.append(named_line("", place_labels(marks, columns), left))
    by_row: dict[tuple[int, int], list[Use]] = {}
    for use in figure.uses:
        if use.device < shown and 0 <= use.start_seconds < min(use.end_seconds, figure.end_seconds):
            by_row.setdefault((use.device, use.row), []).append(use)
    for device in range(shown):
        for row, buffer in enumerate(figure.rows):
            uses = sorted(by_row.get((device, row), []), key=lambda use: use.start_seconds)
            name = names[device] if row == 0 else ""
            style = "bold" if name else "dim"
            content = _row(uses, axis, figure.end_seconds, glyphs)
            lines.append(named_line(f"{name:<{indent}} {buffer}", content, left, style))
    if figure.devices > shown:
        more = figure.devices - shown
        lines.append(Text(f"{more} more {'device is' if more == 1 else 'devices are'} not shown.", style="dim"))
    end = duration(figure.end_seconds, micro=glyphs.micro)
    last = columns - cell_len(end)
    labels = [(0, "0")]
    for piece in axis.cuts:
        length = duration((piece.end_ns - piece.start_ns) / 1e9, micro=glyphs.micro)
        column, label = int(piece.first_column) + 2, f"{glyphs.cut} {length} {glyphs.cut}"
        if column + cell_len(label) < last:  # how long the whole took is worth more
            labels.append((column, label))
    labels.append((last, end))
    lines.append(named_line("time", place_labels(labels, columns, "dim"), left))
    return lines


def legend_of_update(width: int, glyphs: Glyphs = UNICODE, words: Mapping[Doing, str] = _WORDS) -> list[Text]:
    """Return the legend of letters, in lines of at most `width` cells."""
    entries = (Text.assemble((_letter(one, glyphs) * 2, _STYLES[one]), " ", text) for one, text in words.items())
    return side_by_side(entries, width)


def _row(uses: Sequence[Use], axis: Axis, end_seconds: float, glyphs: Glyphs) -> Text:
    """One buffer: what happens in it, and spaces while it is free."""
    stretches: list[Use | None] = []
    edges = [0.0]
    for use in uses:
        start, end = axis.coordinate(_ns(use.start_seconds)), axis.coordinate(_ns(use.end_seconds))
        if start > edges[-1]:
            stretches.append(None)
            edges.append(start)
        stretches.append(use)
        edges.append(max(end, edges[-1]))
    if edges[-1] < axis.columns:
        stretches.append(None)
        edges.append(float(axis.columns))
    least = [int(use is not None and use.doing is not Doing.HELD) for use in stretches]
    text = Text()
    for stretch, width in zip(stretches, share_columns(edges, least), strict=True):
        if stretch is None:
            text.append(" " * width)
        elif width:
            filled = _filled(stretch, width, cut=stretch.end_seconds > end_seconds, glyphs=glyphs)
            text.append(filled, _STYLES[stretch.doing])
    for piece in axis.cuts:
        column = axis.column((piece.start_ns + piece.end_ns) // 2)
        text = Text.assemble(text[:column], (glyphs.cut, _CUT), text[column + 1 :])
    return text


def _filled(use: Use, width: int, *, cut: bool, glyphs: Glyphs) -> str:
    """The letter, the bucket's number if there is room for it, and the letter again."""
    letter = _letter(use.doing, glyphs)
    label = "" if use.doing is Doing.HELD else f"{letter}{use.bucket}"
    filled = (label if len(label) <= width - cut else "").ljust(width, letter)
    return filled[:-1] + glyphs.takes_over if cut and use.doing is not Doing.HELD else filled


def _letter(doing: Doing, glyphs: Glyphs) -> str:
    return _LETTERS.get(doing, glyphs.outside)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
