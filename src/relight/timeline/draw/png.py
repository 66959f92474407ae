"""Figures as PNG, for where SVG is not taken.

Drawn by resvg (`pip install 'relight[png]'`): one wheel, no system library, and it knows all that the figures use.
"""

import functools

from relight.errors import UsageError

ZOOM = 3.0  # 3300 pixels wide: 300 to the inch on a page of A4 in landscape
_FAMILIES = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica", "Open Sans", "Roboto", "Ubuntu")
_PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">{}</svg>'
_TEXT = '<text x="2" y="15" font-family="sans-serif" font-size="12">relight</text>'


def to_png(svg: str) -> bytes:
    """Draw a figure on white. Raises UsageError if resvg is not installed, or finds no font for the text."""
    return _draw(svg, _family(), ZOOM)


@functools.cache
def _family() -> str:
    """A font for the text. resvg does not ask the system which one is meant by "sans-serif", and takes Arial."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise UsageError(
            "--png needs resvg: pip install 'relight[png]' (or write --svg, and convert it with a tool of your own)"
        ) from None
    for family in _FAMILIES:
        if _draw(_PROBE.format(_TEXT), family) != _draw(_PROBE.format(""), family):
            return family
    # Without a font, text is left out without a word.
    raise UsageError("--png: this machine has no fonts, so the figure would have no text: install DejaVu or others")


def _draw(svg: str, family: str, zoom: float = 1.0) -> bytes:
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom, background="#ffffff", sans_serif_family=family))
