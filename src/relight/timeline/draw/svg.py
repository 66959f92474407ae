"""Draws a window as SVG, for papers and pages: devices as rows, phases as bars, a red barrier, lightning. Pure.

The picture is that of the terminal (`terminal.draw`), to scale in pixels. Nothing depends on colour alone: each phase
has its letter and a texture of its own. Text from outside (names, reasons) is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise

from relight.timeline.draw.terminal import duration
from relight.timeline.model.axis import Axis, plan_axis
from relight.timeline.model.spans import Activity, Row, Span
from relight.timeline.model.windows import Band, Window, name_steps

WIDTH = 1100
MAX_ROWS = 64
_LEFT = 84
_RIGHT = 16
_TOP = 8
_STEP_LANE = 20
_CONTROLLER_LANE = 34
_ROW = 54
_BAR = 28
_VERSION = 8
_FOOT = 24
_LETTER_PIXELS = 5.6  # of the small font below, on average

NAMES = {
    Activity.FORWARD: "Forward",
    Activity.BACKWARD: "Backward",
    Activity.BARRIER: "Barrier",
    Activity.OPTIMIZER: "Optimizer step",
    Activity.OUTSIDE: "between steps",
    Activity.PARKED: "paused",
    Activity.STARTING: "starting",
    Activity.DONE: "done",
    Activity.DEAD: "no process",
}
_SHORT = {Activity.FORWARD: "F", Activity.BACKWARD: "B", Activity.OPTIMIZER: "O", Activity.PARKED: "p"}
# What the controller has done, in words for every width.
_CONTROLLER = {
    "notice": ("Failure noticed", "Notice"),
    "stop": ("Stop + Clean + Reset", "Stop"),
    "restore": ("Restoration + Rollback", "Restore"),
    "redo": ("Step again", "Again"),
}
_NEXT_STEP = ("Next step", "Next")
_STYLE = """
text { font: 11px system-ui, sans-serif; fill: var(--ink, #1c1c1c) }
.small { font-size: 10px } .name { font-weight: 600 } .in { fill: #111 } .out { fill: #fff }
.FORWARD { fill: #56b4e9 } .BACKWARD { fill: #e69f00 } .BARRIER { fill: #d00000 } .OPTIMIZER { fill: #cc79a7 }
.PARKED { fill: #9a9a9a } .OUTSIDE { fill: #e4e4e4 } .STARTING { fill: #f3eec2 } .DONE { fill: #cfe8cf }
.DEAD { fill: none; stroke: #d55e00; stroke-dasharray: 4 3 }
.dark { fill: #00601e } .light { fill: #7fe08f }
.barrier { stroke: #d00000; stroke-width: 1.6; stroke-dasharray: 5 3 }
.strike { fill: #ffd400; stroke: #b03000; stroke-width: 1 }
.notice { fill: #f2a07b } .stop { fill: #c9572b } .restore { fill: #4a90c8 } .redo { fill: #b9d8ee }
.restored { fill: none; stroke: #0072b2; stroke-width: 2 } .head { fill: #0072b2 }
.rule { stroke: var(--rule, #cccccc) } .cut { fill: var(--paper, #ffffff); stroke: #888888 }
"""


def draw_svg(window: Window, title: str = "") -> str:
    """The window as one SVG document. Rows beyond MAX_ROWS that nothing happened to are left out, and counted."""
    rows = window.choose_rows(MAX_ROWS)
    hidden = len(window.rows) - len(rows)
    axis = plan_axis(window.start_ns, window.end_ns, WIDTH - _LEFT - _RIGHT, _changes(window, rows))
    has_controller = bool(window.bands)
    first = _TOP + _STEP_LANE + (_CONTROLLER_LANE if has_controller else 0)
    bottom = first + len(rows) * _ROW
    height = bottom + _FOOT + (14 if hidden else 0)
    tops = {row.rank: first + index * _ROW for index, row in enumerate(rows)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title or "timeline")}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{_TEXTURES}",
        *_step_names(rows, axis),
        *(_controller(window.bands, axis) if has_controller else ()),
        *(part for row in rows for part in _row(row, tops[row.rank], axis, window)),
        *_barriers(rows, axis, first, bottom),
        *_restores(window, tops, axis),
        *_strikes(window, tops, axis),
        *_cuts(axis, first, bottom),
        *_foot(window, axis, bottom),
    ]
    if hidden:
        parts.append(_text(_LEFT, height - 4, f"{hidden} more ranks are not shown", "small"))
    return "\n".join([*parts, "</svg>", ""])


def legend_svg() -> str:
    """Draw the legend of colours, textures and signs."""
    entries = [(activity.value, NAMES[activity]) for activity in Activity if activity is not Activity.STARTING]
    entries += [("dark", "parameters before the update (version i)"), ("light", "after it (i + 1)")]
    x, y = 4.0, 4.0
    parts = []
    for kind, words in entries:
        length = 30 + len(words) * _LETTER_PIXELS
        if x + length > WIDTH:
            x, y = 4.0, y + 20
        parts.append(_rect(x, y, 18, 12, kind) + _texture(x, y, 18, 12, kind) + _text(x + 23, y + 10, words, "small"))
        x += length + 12
    parts.append(_bolt(x + 8, y + 6, 0.5) + _text(x + 20, y + 10, "failure", "small"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 20:.0f}" role="img" aria-label="legend">'
    return "\n".join([head, f"<style>{_STYLE}</style>{_TEXTURES}", *parts, "</svg>", ""])


# --- what is where ------------------------------------------------------------------------------------------------
def _changes(window: Window, rows: Sequence[Row]) -> list[int]:
    if not window.bands:
        return []
    times = [time for row in rows for span in row.spans for time in (span.start_ns, span.end_ns)]
    return times + [time for band in window.bands for time in band.times] + [s.at_ns for s in window.strikes]


def _x(axis: Axis, time_ns: float) -> float:
    return _LEFT + axis.coordinate(time_ns)


def _step_names(rows: Sequence[Row], axis: Axis) -> Iterable[str]:
    free = 0.0
    for start, words in name_steps(rows):
        x = max(_x(axis, start), free)
        if x + len(words) * _LETTER_PIXELS < _LEFT + axis.columns:
            free = x + len(words) * _LETTER_PIXELS + 8
            yield _text(x, _TOP + 12, words, "small")


def _controller(bands: Sequence[Band], axis: Axis) -> Iterable[str]:
    y = _TOP + _STEP_LANE
    yield _text(4, y + 17, "controller", "name")
    for band in sorted(bands, key=lambda each: each.struck_ns):
        for (kind, words), (start, end) in zip(_CONTROLLER.items(), pairwise(band.times), strict=True):
            left, right = _x(axis, start), _x(axis, end)
            if right <= left:
                continue
            name, short = words if kind != "redo" or band.repeats else _NEXT_STEP
            told = f"{name}: {duration((end - start) / 1e9)}"
            yield f"<g><title>{escape(told)}</title>{_arrow(left, right, y, kind)}"
            room = right - left - 12
            fits = next((w for w in (told, name, short) if len(w) * _LETTER_PIXELS < room), "")
            yield (_text(left + 5, y + 17, fits, "small in") if fits else "") + "</g>"


def _arrow(left: float, right: float, y: float, kind: str) -> str:
    tip, height = min(8.0, right - left), 26.0
    points = (
        (left, y),
        (right - tip, y),
        (right, y + height / 2),
        (right - tip, y + height),
        (left, y + height),
    )
    return f'<polygon class="{kind}" points="{" ".join(f"{x:.1f},{top:.1f}" for x, top in points)}"/>'


def _row(row: Row, top: float, axis: Axis, window: Window) -> Iterable[str]:
    yield _text(4, top + 19, f"rank {row.rank}", "name")
    yield f'<line class="rule" x1="4" x2="{_LEFT + axis.columns}" y1="{top + _ROW - 6}" y2="{top + _ROW - 6}"/>'
    before: Span | None = None
    for span in row.spans:
        left, right = _x(axis, span.start_ns), _x(axis, span.end_ns)
        # A barrier of a millisecond is what the figure is about: it stays visible.
        wide = max(right - left, 2.0 if span.activity is Activity.BARRIER else 0.6)
        kind = span.activity.value
        told = f"{span}; {duration((span.end_ns - span.start_ns) / 1e9)}"
        yield f"<g><title>{escape(told)}</title>{_rect(left, top, wide, _BAR, kind)}"
        follows_dead = before is not None and before.activity is Activity.DEAD
        indent = 11 if follows_dead or span.activity is Activity.DEAD else 4
        words = _fitting(span.activity, wide - indent)
        ink = "small out" if span.activity is Activity.BARRIER else "small in"
        yield _texture(left, top, wide, _BAR, kind)
        yield (_text(left + indent, top + 18, words, ink) if words else "") + "</g>"
        yield from _version(span, left, right, top, window)
        if follows_dead and span.activity is not Activity.DEAD:
            points = f"{left:.1f},{top} {left + 9:.1f},{top + _BAR / 2} {left:.1f},{top + _BAR}"
            yield f'<polygon class="head" points="{points}"><title>{escape(span.process)} takes over</title></polygon>'
        before = span


def _fitting(activity: Activity, width: float) -> str:
    for words in (NAMES[activity], _SHORT.get(activity, "")):
        if words and len(words) * _LETTER_PIXELS + 6 < width:
            return words
    return ""


def _version(span: Span, left: float, right: float, top: float, window: Window) -> Iterable[str]:
    if window.shown_version(span) is None:
        return
    kind = "dark" if span.version <= window.base_version else "light"
    yield _rect(left, top + _BAR + 2, right - left, _VERSION, kind, f"parameters of version {span.version}")


def _barriers(rows: Sequence[Row], axis: Axis, top: float, bottom: float) -> Iterable[str]:
    """Draw when the last rank came to a barrier: one line through all rows. No rank writes to the left of it."""
    passed: dict[tuple[int, int], int] = {}
    for row in rows:
        for span, after in pairwise(row.spans):
            if span.activity is Activity.BARRIER and after.activity is Activity.OPTIMIZER:
                key = (span.step, span.generation)
                passed[key] = max(span.start_ns, passed.get(key, span.start_ns))
    for (step, _), at in sorted(passed.items()):
        x = _x(axis, at)
        yield (
            f'<line class="barrier" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{bottom - 8}">'
            f"<title>gradient synchronization barrier of step {step}</title></line>"
        )


def _restores(window: Window, tops: Mapping[int, float], axis: Axis) -> Iterable[str]:
    """From each source to each replaced rank, while the state is copied."""
    for band in window.bands:
        for source in band.sources:
            for target in band.replaced:
                if source not in tops or target not in tops:
                    continue
                start, end = _x(axis, band.stopped_ns), _x(axis, band.resumed_ns)
                down = tops[target] > tops[source]
                y1 = tops[source] + (_BAR if down else 0)
                y2 = tops[target] + (0 if down else _BAR)
                middle = (start + end) / 2
                tip = 6 if down else -6
                told = f"version {band.target_version} restored from rank {source} to rank {target}"
                curve = f"M{start:.1f},{y1:.1f} C{middle:.1f},{y1:.1f} {middle:.1f},{y2 - tip:.1f}"
                head = f"{end - 5:.1f},{y2 - tip:.1f} {end + 5:.1f},{y2 - tip:.1f} {end:.1f},{y2 + tip / 2:.1f}"
                yield f'<g><title>{told}</title><path class="restored" d="{curve} {end:.1f},{y2 - tip:.1f}"/>'
                yield f'<polygon class="head" points="{head}"/></g>'


def _strikes(window: Window, tops: Mapping[int, float], axis: Axis) -> Iterable[str]:
    for strike in window.strikes:
        x = _x(axis, strike.at_ns)
        y = tops.get(strike.rank, _TOP + _STEP_LANE) + _BAR / 2
        who = f"rank {strike.rank}" if strike.rank >= 0 else "no rank"
        yield f"<g><title>{escape(f'failure {strike.number}: {who} {strike.kind}')}</title>{_bolt(x, y)}</g>"


def _bolt(x: float, y: float, scale: float = 1.0) -> str:
    shape = ((2, -14), (-6, 2), (-1, 2), (-3, 14), (6, -3), (1, -3))
    points = " ".join(f"{x + dx * scale:.1f},{y + dy * scale:.1f}" for dx, dy in shape)
    return f'<polygon class="strike" points="{points}"/>'


def _cuts(axis: Axis, top: float, bottom: float) -> Iterable[str]:
    for piece in axis.cuts:
        x = _LEFT + piece.first_column + piece.columns / 2
        length = duration((piece.end_ns - piece.start_ns) / 1e9)
        zigzag = " ".join(
            f"{x + (4 if index % 2 else -4):.1f},{y:.1f}" for index, y in enumerate(range(int(top) - 4, int(bottom), 9))
        )
        yield f'<polyline class="cut" fill="none" points="{zigzag}"><title>{length}, shortened</title></polyline>'
        yield _text(x - len(length) * 3, bottom + 6, f"≈ {length}", "small")


def _foot(window: Window, axis: Axis, bottom: float) -> Iterable[str]:
    def label(time_ns: int) -> str:
        return duration((time_ns - window.zero_ns) / 1e9, "−")

    y = bottom + 16
    yield _text(_LEFT, y, label(window.start_ns), "small")
    last = label(window.end_ns)
    yield _text(WIDTH - _RIGHT - len(last) * _LETTER_PIXELS, y, last, "small")
    zero = _x(axis, window.zero_ns)
    if _LEFT + 70 < zero < WIDTH - 90:
        yield _text(zero - 3, y, "0", "small")
        yield f'<line class="rule" x1="{zero:.1f}" x2="{zero:.1f}" y1="{bottom - 8}" y2="{bottom + 4}"/>'


# --- shapes -------------------------------------------------------------------------------------------------------
_TEXTURES = """<defs>
<pattern id="t-BACKWARD" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line x1="0" y1="0" x2="0" y2="6" stroke="#7a5200" stroke-width="1" opacity=".45"/></pattern>
<pattern id="t-OPTIMIZER" width="6" height="6" patternUnits="userSpaceOnUse">
<path d="M0 3H6M3 0V6" stroke="#6b2a52" stroke-width=".8" opacity=".5"/></pattern>
<pattern id="t-PARKED" width="5" height="5" patternUnits="userSpaceOnUse">
<circle cx="2.5" cy="2.5" r=".9" fill="#3a3a3a" opacity=".6"/></pattern>
<pattern id="t-light" width="4" height="4" patternUnits="userSpaceOnUse">
<path d="M0 0H4" stroke="#00601e" stroke-width=".8" opacity=".6"/></pattern>
</defs>"""
_TEXTURED = {"BACKWARD", "OPTIMIZER", "PARKED", "light"}


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    told = f"<title>{escape(title)}</title>" if title else ""
    shape = f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height}"'
    return f"{shape}>{told}</rect>" if told else f"{shape}/>"


def _texture(x: float, y: float, width: float, height: float, kind: str) -> str:
    if kind not in _TEXTURED or width < 4:
        return ""
    return f'<rect fill="url(#t-{kind})" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"/>'


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
