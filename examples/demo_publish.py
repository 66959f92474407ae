"""Trains a model and serves it at the same time, while workers and a server are killed.

    make demo-publish

A small GPT is trained by two processes and published every few seconds to two generation servers. Text is generated
throughout, so that one can watch it improve. On the way rank 0 is killed, then rank 1, then one of the servers, which
is started again and must get the newest weights by itself. At the end both servers must hold exactly the weights that
training ended with. The exit status is 0 only if they do, if everything that was planned really struck, and if no
answer of a server ever went back to an older version.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relight.core.account.report import JobReport, decode_report
from relight.parent import end_with_parent

HERE = Path(os.path.relpath(Path(__file__).resolve().parent))
TRAIN, SERVE = HERE / "gpt" / "train.py", HERE / "generation" / "server.py"
MODEL = "--layers 3 --width 128 --heads 4".split()
BATCH = "--batch-size 8".split()
RANKS, STANDBYS = 2, 1
PROMPT = "def "
SENTENCE = "import os\n\n\ndef main():\n    return os.path.join(self.name, None)\n"
WRITTEN_BYTES = 48
BETWEEN_REQUESTS_SECONDS = 0.3
ANSWER_SECONDS = 60.0
START_SECONDS = 120.0
LAST_VERSION_SECONDS = 30.0
# A terminal's Ctrl-C reaches everyone, so they are given time to end by themselves before they are asked, then made to.
PATIENCE_SECONDS = (3.0, 30.0)
SHOWN = re.compile(r"relight: (failure|recovered|\S+ stopped)|published|publishing|was dropped")
DIGEST = re.compile(r"version (\d+) is published; its digest is ([0-9a-f]+)")

console = Console(highlight=False, soft_wrap=True)


class DemoError(Exception):
    """Something went wrong that the demo is not about."""


@dataclass
class Answers:
    """The answers of one server process."""

    count: int = 0
    versions: list[int] = field(default_factory=list)  # each once, as they appeared
    went_back: bool = False
    first_loss: float = 0.0
    last_loss: float = 0.0

    def note(self, version: int, loss: float) -> bool:
        """Returns whether the version is a new one."""
        self.count += 1
        new = not self.versions or version != self.versions[-1]
        if new:
            self.went_back |= bool(self.versions) and version < self.versions[-1]
            self.versions.append(version)
        self.first_loss = self.first_loss or loss
        self.last_loss = loss
        return new


class Server:
    """A generation server, and what each of its processes answered."""

    def __init__(self, name: str, run_dir: Path, log: Path) -> None:
        self.name = name
        self._log = log
        self._command = [sys.executable, str(SERVE), str(run_dir), "--port", "0", "--name", name, *MODEL]
        self.lives: list[Answers] = []
        self.start()

    def start(self) -> None:
        """Start a process, which takes a few seconds until it is ready."""
        self.lives.append(Answers())
        self._url = ""
        with open(self._log, "ab") as log:
            self.process = start(self._command, stdout=subprocess.PIPE, stderr=log)

    def is_ready(self, timeout_seconds: float = 0.0) -> bool:
        """Return whether it takes requests, within the time. Raises DemoError if it has ended."""
        output = self.process.stdout
        assert output is not None
        if not self._url and select.select([output], [], [], timeout_seconds)[0]:
            line = output.readline().decode()
            if not line:
                raise DemoError(f"{self.name} ended before it served; see {self._log}")
            self._url = line.split()[-1]
        return bool(self._url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        end(self.process)

    def ask(self, path: str, question: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises DemoError if the server does not answer."""
        data = None if question is None else json.dumps(question).encode()
        try:
            with urllib.request.urlopen(f"{self._url}{path}", data, timeout=ANSWER_SECONDS) as answer:
                content: dict[str, Any] = json.load(answer)
                return content
        except OSError as error:
            raise DemoError(f"{self.name} does not answer: {error}; see {self._log}") from error

    def generate(self) -> tuple[bool, str]:
        """One request; whether it was answered with a version not seen before, and a line for people."""
        answer = self.ask(
            "/generate", {"prompt": PROMPT, "max_new_tokens": WRITTEN_BYTES, "temperature": 0.7, "score": SENTENCE}
        )
        new = self.lives[-1].note(answer["version"], answer["loss"])
        text = "".join(c if c.isprintable() else "␤" if c == "\n" else " " for c in PROMPT + answer["text"])
        return new, f"{self.name}  version {answer['version']:>4}  loss {answer['loss']:.3f}  {text}"

    @property
    def version(self) -> int:
        """The version of the last answer."""
        versions = self.lives[-1].versions
        return versions[-1] if versions else -1


def main() -> int:
    options = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    run_dir = options.run_dir or Path("runs") / f"demo-publish-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        return run(options, run_dir)
    except KeyboardInterrupt:
        console.print("\nInterrupted; nothing was left running.")
        return 130
    except (DemoError, OSError, subprocess.SubprocessError) as error:
        console.print(f"\n[bold red]The demo could not be completed:[/] {error}")
        return 1


def run(options: argparse.Namespace, run_dir: Path) -> int:
    """Train, serve, kill, compare; returns the exit status."""
    run_dir.mkdir(parents=True)
    faults = [
        f"kill rank 0 in BACKWARD of step {options.steps // 4}",
        f"kill rank 1 in OPTIMIZER of step {options.steps // 2}",
    ]
    console.rule("[bold]Training, and two servers that answer meanwhile[/]", align="left")
    with contextlib.ExitStack() as running:
        servers = [Server(name, run_dir, run_dir / f"{name}.log") for name in ("server-a", "server-b")]
        for server in servers:
            running.callback(server.stop)
        for server in servers:
            if not server.is_ready(START_SECONDS):
                raise DemoError(f"{server.name} did not start within {START_SECONDS:g} s")
        output = run_dir / "training.log"
        training = start_training(options, run_dir, faults, output)
        running.callback(end, training)
        killed_at = generate_throughout(options, servers, training, output)
        if training.returncode:
            raise DemoError(f"training ended with {training.returncode}; see {output}")
        published = DIGEST.search(output.read_text())
        if published is None:
            raise DemoError(f"training did not say what it published; see {output}")
        held = [wait_for_version(server, int(published[1])) for server in servers]
    report = decode_report((run_dir / "report.json").read_bytes())
    return compare(servers, held, (int(published[1]), published[2]), report, len(faults), killed_at)


def start(command: list[str], **streams: Any) -> "subprocess.Popen[bytes]":
    """Start a process that does not outlive the demo, however the demo ends."""
    # Threads would make `preexec_fn` unsafe; the demo has none.
    return subprocess.Popen(command, preexec_fn=functools.partial(end_with_parent, os.getpid()), **streams)  # noqa: PLW1509


def start_training(
    options: argparse.Namespace, run_dir: Path, faults: list[str], output: Path
) -> "subprocess.Popen[bytes]":
    command = ["run", "--nproc-per-node", str(RANKS), "--standby", str(STANDBYS), "--run-dir", str(run_dir)]
    for fault in faults:
        command += ["--chaos", fault]
    command += [str(TRAIN), "--steps", str(options.steps), "--publish-every", str(options.publish_every)]
    command += ["--evaluate-every", str(options.steps + 1), *MODEL, *BATCH]
    console.print(f"\n$ relight {shlex.join(command)}\n", style="dim", markup=False)
    with open(output, "wb") as file:
        return start([sys.executable, "-m", "relight.cli", *command], stdout=file, stderr=subprocess.STDOUT)


def generate_throughout(
    options: argparse.Namespace, servers: list[Server], training: "subprocess.Popen[bytes]", output: Path
) -> int:
    """Ask both servers in turn until training ends; returns the version that was served when one was killed."""
    lines = new_lines(output)
    survivor, victim = servers
    killed_at, waiting = -1, False
    started = time.monotonic()
    while training.poll() is None:
        show_training(lines)
        for server in servers:
            if (waiting and server is victim) or not server.is_ready():
                continue
            new, text = server.generate()
            if new:
                console.print(f"{time.monotonic() - started:5.1f} s  {text}", markup=False, overflow="ellipsis")
        if killed_at < 0 and victim.version >= options.steps * 3 // 8:
            killed_at, waiting = victim.version, True
            victim.kill()
            tell(f"{victim.name} is killed (SIGKILL), which has version {killed_at}")
        elif waiting and survivor.version > killed_at:
            waiting = False
            victim.start()
            tell(f"{victim.name} is started again; version {survivor.version} is out meanwhile")
        time.sleep(BETWEEN_REQUESTS_SECONDS)
    show_training(lines)
    return killed_at


def tell(text: str) -> None:
    console.print(f"demo: {text}", style="yellow", markup=False)


def new_lines(path: Path) -> Iterator[str]:
    """Whole lines of a file that grows; the empty string when there is no new one yet."""
    begun = ""
    with open(path, errors="replace") as file:
        while True:
            begun += file.readline()
            if begun.endswith("\n"):
                yield begun.rstrip()
                begun = ""
            else:
                yield ""


def show_training(lines: Iterator[str]) -> None:
    """Show the progress of the training meanwhile."""
    while line := next(lines):
        if SHOWN.search(line):
            console.print(line, style="yellow", markup=False)


def wait_for_version(server: Server, version: int) -> dict[str, Any]:
    """The weights of the server, once it has `version` or the time is up."""
    if not server.is_ready(START_SECONDS):
        raise DemoError(f"{server.name} did not start within {START_SECONDS:g} s")
    deadline = time.monotonic() + LAST_VERSION_SECONDS
    while (held := server.ask("/version"))["version"] != version and time.monotonic() < deadline:
        time.sleep(BETWEEN_REQUESTS_SECONDS)
    _, text = server.generate()
    console.print(f"at the end  {text}", markup=False)
    return held


def end(process: "subprocess.Popen[Any]") -> None:
    """See that it has ended: by itself, asked, or forced."""
    if process.poll() is not None:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process.terminate()
    for patience, ask in zip(PATIENCE_SECONDS, (process.terminate, process.kill), strict=True):
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            ask()
    process.wait()


# --- the comparison -----------------------------------------------------------------------------------------------
def compare(
    servers: list[Server],
    held: list[dict[str, Any]],
    published: tuple[int, str],
    report: JobReport,
    faults: int,
    killed_at: int,
) -> int:
    """Say who holds what; returns the exit status."""
    console.print()
    console.rule("[bold]What each of them holds[/]", align="left")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "version", "digest", "answers", "versions", "loss"):
        table.add_column(title, no_wrap=True)
    table.add_row("training", str(published[0]), published[1], "", "", "")
    for server, last in zip(servers, held, strict=True):
        for number, life in enumerate(server.lives, start=1):
            ended = number < len(server.lives)
            name = server.name if len(server.lives) == 1 else f"{server.name} ({number})"
            table.add_row(
                name,
                "killed" if ended else str(last["version"]),
                "" if ended else last["digest"],
                str(life.count),
                str(len(set(life.versions) - {-1})),
                f"{life.first_loss:.3f} → {life.last_loss:.3f}",
            )
    console.print(table)
    console.print()
    problems = find_problems(servers, held, published, report, faults, killed_at)
    for problem in problems:
        console.print(f"[bold red]{problem}[/]")
    if not problems:
        console.print(
            f"[bold green]Equal.[/] {faults} workers and a server were killed; both servers hold exactly the weights "
            "that training ended with."
        )
    return 1 if problems else 0


def find_problems(
    servers: list[Server],
    held: list[dict[str, Any]],
    published: tuple[int, str],
    report: JobReport,
    faults: int,
    killed_at: int,
) -> list[str]:
    """Everything that speaks against the claim that servers got what was published, whatever was killed."""
    problems = []
    for server, last in zip(servers, held, strict=True):
        if (last["version"], last["digest"]) != published:
            problems.append(f"DIFFERENT: {server.name} holds version {last['version']}, digest {last['digest']}")
        for number, life in enumerate(server.lives, start=1):
            if life.went_back:
                problems.append(f"{server.name}, process {number}, went back to an older version: {life.versions}")
        if not server.lives[-1].last_loss < server.lives[0].first_loss:
            problems.append(f"{server.name} did not improve: loss {server.lives[-1].last_loss:.3f}")
    if len(report.failures) != faults:
        problems.append(f"{len(report.failures)} workers were lost instead of {faults}")
    if killed_at < 0 or len(servers[1].lives) != 2:
        problems.append(f"{servers[1].name} was not killed: training was over before")
    elif not any(version > killed_at for version in servers[1].lives[1].versions):
        problems.append(f"{servers[1].name} got no newer version after it was started again")
    return problems


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=800, help="optimizer steps in all (default: 800)")
    add("--publish-every", type=int, default=40, help="steps between two publications (default: 40)")
    add("--run-dir", type=Path, help="for reports and logs (default: a new one in runs/)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
