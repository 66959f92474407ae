"""The page in a real browser. Screenshots are left in RELIGHT_SCREENSHOTS, if that names a directory."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.core.protocol.events import ProcessSuspected
from relight.core.protocol.position import Phase, Position
from relight.wire.status import EngineVersion, Gpu, GpuStatus, PublishStatus, RestoreStatus
from tests.dashboard.conftest import Serve
from tests.dashboard.made_up import MadeUpJob
from tests.dashboard.webdriver import MISSING, Browser, is_there

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not is_there(), reason=MISSING)]

TEXT = "return document.getElementById(arguments[0]).textContent"
HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=2</script>'


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    window = Browser()
    try:
        yield window
    finally:
        window.close()


@pytest.fixture
def browser(window: Browser) -> Browser:
    """The window, without what an earlier test left in it."""
    window.open("about:blank")
    window.messages()
    return window


def keep(browser: Browser, name: str) -> None:
    """Leave a picture for people, who must look at it: no test sees that something is ugly."""
    folder = os.environ.get("RELIGHT_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(folder) / f"{name}.png")


def shows(browser: Browser, identifier: str, text: str) -> None:
    browser.wait_for(
        "document.getElementById(arguments[0]).textContent.includes(arguments[1])", f"{text!r}", identifier, text
    )


def painted(browser: Browser, x: float, y: float) -> list[int]:
    """The colour of the timeline at a share of its width and height."""
    script = """const c = document.getElementById("timeline"); const t = c.getContext("2d");
      return [...t.getImageData(Math.round(c.width * arguments[0]), Math.round(c.height * arguments[1]), 1, 1).data]"""
    found: list[int] = browser.run(script, x, y)
    return found


def test_every_view_of_a_job_with_a_failure(made: MadeUpJob, tmp_path: Path, serve: Serve, browser: Browser) -> None:
    made.fail(2)
    made.steps(2)
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "rank-2.log").write_text("epoch 1\nepoch 2\n")
    engines = (EngineVersion(name="vllm-0", pid=41, version=10), EngineVersion(name="vllm-1", pid=42, version=13))
    moving = {"version": 13, "moved_bytes": 3 * 2**30, "total_bytes": 4 * 2**30, "update_seconds": 1.5}
    totals = {"updates": 6, "updates_bytes": 24 * 2**30, "updates_seconds": 12.0}
    fine = Gpu(index=0, name="H200", busy_share=0.98, temperature_celsius=61, memory_used_bytes=60 * 2**30)
    hot = Gpu(index=1, name="H200", temperature_celsius=95, uncorrected_errors=2)
    made.say(made.at, GpuStatus(agent="node-0", gpus=(fine, hot)))
    made.say(made.at, PublishStatus(process="w0", engines=engines, dropped={"sglang-0": "it hung"}, **moving, **totals))  # type: ignore[arg-type]
    served = serve(tmp_path / "run")
    browser.open(served.url)
    shows(browser, "job", "made-up")
    shows(browser, "link", "live")
    shows(browser, "figures", "13")  # steps
    shows(browser, "failures", "was killed by SIGKILL")
    keep(browser, "follow")
    browser.run("document.querySelector('#failures tr.pick').click()")
    browser.wait_for("!relightTimeline.follow && relightTimeline.tiles.asked.size === 0", "the failure is in view")
    keep(browser, "failure")
    views = {
        "recoveries": "back to 10",
        "spares": "copies of all parameters",
        "engines": "vllm-041103 steps behind",
        "stragglers": "rank",
        "coverage": "Every rank holds all of the state",
    }
    for tab, text in views.items():
        browser.run(f"document.getElementById('tab-{tab}').click()")
        shows(browser, tab, text)
        assert browser.run(f"return document.getElementById('{tab}').hidden") is False
        keep(browser, tab)
    assert browser.run("return document.querySelectorAll('#ranks .row.line:not([hidden])').length") == 4
    shows(browser, "ranks", "98 % · 61 °C · 60 GiB")
    shows(browser, "ranks", "⚠ 95 °C")
    browser.run("document.querySelectorAll('#ranks .row.line')[2].click()")
    shows(browser, "log", "epoch 2")
    with (tmp_path / "run" / "logs" / "rank-2.log").open("a") as log:
        log.write("epoch 3\n")
    shows(browser, "log", "epoch 3")
    keep(browser, "rank")
    browser.run("document.getElementById('rank').close()")
    assert browser.messages() == []


def test_a_failure_appears_by_itself(made: MadeUpJob, tmp_path: Path, serve: Serve, browser: Browser) -> None:
    served = serve(tmp_path / "run")
    browser.open(served.url)
    shows(browser, "link", "live")
    made.die(1)
    browser.wait_for("document.querySelector('#failures tr.pick') !== null", "the failure is listed")
    shows(browser, "announce", "rank 1 killed")  # for those who do not see it
    assert browser.run("return relightTimeline.failures.length") == 1


def test_a_recovery_says_whom_it_waits_for_and_how_far_the_copy_is(
    made: MadeUpJob, tmp_path: Path, serve: Serve, browser: Browser
) -> None:
    made.die(1)
    served = serve(tmp_path / "run")
    browser.open(served.url)
    shows(browser, "waiting", "waiting for ranks 0, 1, 2, 3 to pause")
    made.stop()
    shows(browser, "waiting", "to hold the agreed version")
    half = {"rank": 1, "generation": made.generation, "copied_bytes": 2**30, "total_bytes": 2**31}
    made.say(made.at, RestoreStatus(process="w4", seconds=2.0, **half))
    shows(browser, "waiting", "Rank 1 copies the state: 1.0 GiB of 2.0 GiB, 512.0 MiB/s, about 2.00 s left")
    keep(browser, "restoring")
    made.restore()
    browser.wait_for("document.getElementById('waiting').hidden", "the job trains on")


def test_a_job_that_nobody_runs_any_more_is_said_to_be_silent(
    made: MadeUpJob, tmp_path: Path, serve: Serve, browser: Browser
) -> None:
    long_ago = time.time() - 60
    os.utime(tmp_path / "run" / "journal.jsonl", (long_ago, long_ago))
    browser.open(serve(tmp_path / "run").url)
    shows(browser, "waiting", "No sign of life from the job's controller")
    shows(browser, "stage", "silent")
    keep(browser, "silent")
    made.steps(1)
    os.utime(tmp_path / "run" / "journal.jsonl")
    browser.wait_for("document.getElementById('waiting').hidden", "it lives")


def test_what_a_hung_rank_was_doing(made: MadeUpJob, tmp_path: Path, serve: Serve, browser: Browser) -> None:
    stack = f'rank 1 (w1):\nCurrent thread 0x1 (most recent call first):\n  File "train.py", line 7 in {HOSTILE}'
    hang = ProcessSuspected(
        process="w1",
        kind="hang",
        evidence="no progress in FORWARD of step 10 for 31.0 s; rank 1 is at train.py, line 7 in load",
        position=Position(step=10, phase=Phase.FORWARD, rank=1),
        noticed_ns=1,
        stack=stack,
    )
    made.tell(made.at, hang)
    browser.open(serve(tmp_path / "run").url)
    shows(browser, "failures", "rank 1 is at train.py")
    browser.run("document.querySelector('#failures button').click()")
    shows(browser, "evidence-stack", "line 7 in " + HOSTILE)
    shows(browser, "evidence-text", "no progress in FORWARD")
    keep(browser, "hang")
    browser.press("\ue00c")  # escape
    browser.wait_for("!document.getElementById('evidence').open", "the window is closed")
    browser.run("document.querySelectorAll('#ranks .row.line')[0].click()")
    browser.run("document.getElementById('stack-ask').click()")
    shows(browser, "stack-note", "no process holds this rank now")  # a made-up job has no processes
    browser.run("document.getElementById('rank').close()")
    assert browser.run("return window.hit ?? null") is None


def test_the_page_goes_on_after_its_server_was_restarted(
    made: MadeUpJob, tmp_path: Path, serve: Serve, browser: Browser
) -> None:
    first = serve(tmp_path / "run")
    browser.open(first.url)
    shows(browser, "link", "live")
    assert first.close() == 0
    shows(browser, "link", "trying again")
    keep(browser, "lost")
    made.steps(1)
    serve(tmp_path / "run", port=first.port)
    shows(browser, "link", "live")
    shows(browser, "figures", "11")
    assert browser.run("return document.querySelectorAll('#ranks .row.line:not([hidden])').length") == 4


def test_nothing_that_a_job_says_is_run(tmp_path: Path, serve: Serve, browser: Browser) -> None:
    made = MadeUpJob(tmp_path / "run", ranks=2, wall=time.time() - 5, job=HOSTILE, agent=HOSTILE)
    made.steps(2)
    made.note(3.0, HOSTILE)
    made.fail(1, evidence=HOSTILE)
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "rank-0.log").write_text(HOSTILE + "\n")
    browser.open(serve(tmp_path / "run").url)
    for place in ("job", "ranks", "failures", "notices"):
        shows(browser, place, HOSTILE)
    browser.run("document.querySelector('#ranks .row.line').click()")
    shows(browser, "log", HOSTILE)
    keep(browser, "hostile")
    assert browser.run("return window.hit ?? null") is None
    assert browser.run("return document.querySelectorAll('img, script:not([src])').length") == 0
    browser.run("document.getElementById('rank').close()")
    assert browser.messages() == []


def test_the_keyboard_reaches_everything(made: MadeUpJob, tmp_path: Path, serve: Serve, browser: Browser) -> None:
    browser.open(serve(tmp_path / "run").url)
    shows(browser, "link", "live")
    browser.wait_for("relightTimeline.ranks.length === 4", "the ranks are there")
    browser.run("document.getElementById('timeline').focus()")
    before = browser.run("return relightTimeline.nsPerPx")
    browser.press("+")
    assert browser.run("return relightTimeline.nsPerPx") < before
    browser.press("\ue012")  # left
    assert browser.run("return relightTimeline.follow") is False
    browser.press("f")
    assert browser.run("return relightTimeline.follow") is True
    assert browser.run("return document.getElementById('follow').getAttribute('aria-pressed')") == "true"
    browser.run("document.getElementById('tab-failures').focus()")
    browser.press("\ue014")  # right
    assert browser.run("return document.activeElement.id") == "tab-recoveries"
    browser.run("document.getElementById('ranks').focus()")
    browser.press("\ue015", "\ue007")  # down, enter
    browser.wait_for("document.getElementById('rank').open", "the rank's window is open")
    shows(browser, "rank-title", "Rank 1")
    browser.press("\ue00c")  # escape
    browser.wait_for("!document.getElementById('rank').open", "the rank's window is closed")


def test_the_colours_are_those_of_the_phases(tmp_path: Path, serve: Serve, browser: Browser) -> None:
    made = MadeUpJob(tmp_path / "run", ranks=4, wall=time.time() - 40, step_seconds=10.0)
    made.steps(3)
    browser.open(serve(tmp_path / "run").url)
    shows(browser, "link", "live")
    browser.wait_for("relightTimeline.ranks.length === 4", "the ranks are there")
    # From 2 s to 12 s: one step; forward until 36 %, then backward until 86 %.
    browser.run("relightTimeline.view(2e9, 12e9)")
    browser.wait_for("relightTimeline.tiles.asked.size === 0 && !relightTimeline.dirty", "the tiles are there")
    script = """const t = relightTimeline; const c = t.canvas.getContext("2d"); t.draw();
      const x = t.x(arguments[0]) * t.ratio, y = (t.rowY(1) + t.bar().top + 3) * t.ratio;
      return [...c.getImageData(Math.round(x), Math.round(y), 1, 1).data].slice(0, 3)"""
    browser.wait_for(
        "(() => { const d = (() => {" + script.replace("arguments[0]", "4e9") + "})(); return d[2] === 233 })()",
        "the forward is drawn",
    )
    assert browser.run(script, 4e9) == [0x56, 0xB4, 0xE9]
    assert browser.run(script, 10.85e9) == [0xD0, 0, 0]  # the barrier


def test_the_strip_of_the_parameters_goes_on_when_zoomed_out(tmp_path: Path, serve: Serve, browser: Browser) -> None:
    made = MadeUpJob(tmp_path / "run", ranks=2, wall=time.time() - 900, step_seconds=0.25)
    made.steps(3000)
    browser.open(serve(tmp_path / "run").url)
    shows(browser, "link", "live")
    browser.wait_for("relightTimeline.ranks.length === 2", "the ranks are there")
    shade = """(at) => { const t = relightTimeline, { bar, strip, top } = t.bar(); t.draw();
      const y = t.rowY(1) + top + bar + 2 + strip / 2;
      const pixel = [t.x(at), y].map((length) => Math.round(length * t.ratio));
      const d = t.canvas.getContext("2d").getImageData(...pixel, 1, 1).data;
      return `rgb(${d[0]}, ${d[1]}, ${d[2]})` }"""
    known = """[relightTimeline.colours.mixed, relightTimeline.colours.old, relightTimeline.colours.new]
      .map((c) => { const p = document.createElement("p"); p.style.color = c; return p.style.color })"""
    # The whole job: many versions in each cell. Then some minutes of it: several cells for each version.
    for start, end in ((0.0, 760e9), (300e9, 420e9)):
        browser.run("relightTimeline.view(arguments[0], arguments[1])", start, end)
        for share in (0.05, 0.3, 0.6, 0.95):
            at = start + share * (end - start)
            browser.wait_for(f"{known}.includes(({shade})({at}))", f"the strip at {at / 1e9:.0f} s")
    browser.run("relightTimeline.base = 1500; relightTimeline.view(0, 760e9)")
    for at, colour in ((100e9, 1), (700e9, 2)):
        browser.wait_for(f"{known}[{colour}] === ({shade})({at})", f"dark up to a version, at {at / 1e9:.0f} s")
    keep(browser, "zoomed-out")


def test_dark_and_narrow(made: MadeUpJob, tmp_path: Path, serve: Serve) -> None:
    made.fail(2)
    made.steps(2)
    served = serve(tmp_path / "run")
    for dark, width, height in ((True, 1440, 900), (False, 700, 1000)):
        browser = Browser(dark=dark, width=width, height=height)
        try:
            browser.open(served.url)
            shows(browser, "failures", "was killed")
            background = browser.run("return getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(18, 20, 23)") is dark
            assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
            browser.run("document.querySelector('#failures tr.pick').click()")
            browser.wait_for("!relightTimeline.follow && relightTimeline.tiles.asked.size === 0", "the tiles are there")
            keep(browser, "dark" if dark else "narrow")
        finally:
            browser.close()
