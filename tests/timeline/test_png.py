"""Figures as pictures."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.errors import UsageError
from relight.timeline.draw import png
from relight.timeline.export import write_timeline
from tests.timeline.jobs import rolled_back, write_run


def size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.fixture
def family() -> Iterator[str]:
    """The font that was found; skips on a machine without fonts (Debian's chromium brings some)."""
    pytest.importorskip("resvg_py")
    png._family.cache_clear()
    try:
        yield png._family()
    except UsageError as error:
        pytest.skip(str(error))
    finally:
        png._family.cache_clear()


@pytest.mark.usefixtures("family")
def test_a_figure_as_a_picture(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", *rolled_back())
    said = write_timeline(run_dir, png=tmp_path / "a.png", svg=tmp_path / "a.svg")
    assert len(said) == 2
    width, height = size((tmp_path / "a.png").read_bytes())
    assert width == 3300
    assert 300 < height < 3000
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<svg")


def test_without_resvg_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    png._family.cache_clear()
    with pytest.raises(UsageError, match=r"pip install 'relight\[png\]'"):
        png.to_png("<svg/>")
    png._family.cache_clear()


def test_without_fonts_there_is_no_picture_that_lacks_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    monkeypatch.setattr(png, "_TEXT", _TEXT_WITHOUT_A_FONT)
    png._family.cache_clear()
    with pytest.raises(UsageError, match="no fonts"):
        png.to_png("<svg/>")
    png._family.cache_clear()


def test_a_font_that_is_not_there_is_passed_over(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = "A font that is not installed"
    if png._draw(png._PROBE.format(png._TEXT), unknown) != png._draw(png._PROBE.format(""), unknown):
        pytest.skip("resvg draws text in another font here when the one that is named is not installed")
    monkeypatch.setattr(png, "_FAMILIES", (unknown, *png._FAMILIES))
    png._family.cache_clear()
    assert png._family() == family


# Nothing is drawn of it, as of any text where there is no font.
_TEXT_WITHOUT_A_FONT = '<text x="2" y="15" font-size="12"></text>'
