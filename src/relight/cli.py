"""The `relight` command: reads arguments, calls the rooms below. No torch, nothing of training."""

import argparse
import datetime
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from relight.errors import UsageError
from relight.flags import ADDRESS_HELP, add_run_flags, hint_at_misplaced_flags, unknown_hint
from relight.goodput import command as goodput_command
from relight.launch import hosts_command
from relight.launch.submit import slurm
from relight.prove import command as prove_command
from relight.prove.doctor import command as doctor_command
from relight.watch import command as watch_command
from relight.weights import command as weights_command

_EXAMPLE = """\
a script needs these lines (see the README):
  import relight
  job = relight.init()
  training = relight.Training(model=model, optimizer=optimizer, data=loader)
  for step in training.steps(until=10_000):
      with step as batch: ...

examples:
  relight run --nproc-per-node 4 --standby 1 train.py --lr 0.1
  relight chaos --nproc-per-node 4 --standby 2 --chaos "kill rank 2 in BACKWARD of step 13" train.py
  relight doctor train.py --lr 0.1
  relight prove --nproc-per-node 2 train.py
  relight status
  relight report
  relight dashboard runs/train-20260101-120000
  relight weights plan model.safetensors --devices 4
  relight simulate --devices 16384
"""


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviated flags, keeps the lines of texts that have several, and says itself what it read."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        if "\n" in f"{self.description}{self.epilog}":
            self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.set_defaults(parser=self)  # of the innermost command that was given

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"relight: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = make_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        parsed.parser.error(unknown_hint(unknown[0], parsed.command, parsed.parser))
    try:
        status = int(parsed.call(parsed))
        print(end="", flush=True)  # here and not at exit, where a failure could not be reported
        return status
    except UsageError as error:
        print(f"relight: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print("relight: the output cannot be written: the disk is full", file=sys.stderr)
        # Else the reader went away (`| head`), and knows it. What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # nothing was started yet, or it has been ended
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from relight import config
    from relight.cluster.place import is_spare
    from relight.launch.commands import join, launch
    from relight.launch.hosts_command import host_name
    from relight.launch.succession import find_run
    from relight.server.records.earlier import has_finished
    from relight.wire.connection.address import read_address

    if arguments.command == "chaos":
        if arguments.explain:
            return _explain_words()
        if not arguments.chaos and not arguments.chaos_rate:
            raise UsageError(
                'no fault given: add --chaos "SENTENCE" or --chaos-rate P (words: relight chaos --explain)'
            )
    dashboard = arguments.dashboard_address or ("" if arguments.dashboard else None)
    if dashboard is not None:
        config.check_dashboard_address(dashboard)
    nodes = config.complete_nodes(arguments)
    endpoint = config.find_endpoint(arguments, nodes)
    hint_at_misplaced_flags(arguments.script_and_arguments)
    if endpoint is None:
        if arguments.lease:
            raise UsageError("--lease is for a job on several nodes: give --rdzv-endpoint HOST:PORT and --token-file")
        if arguments.token_file:
            config.read_shared_token(arguments.token_file)  # of no use on one node, but a mistake in it is one
        tls = config.find_tls(arguments, (config.LOOPBACK, 0), is_first=True)
        settings = config.build_settings(arguments, datetime.datetime.now())
        return launch(settings, quiet=arguments.quiet, dashboard=dashboard, tls=tls)
    token = config.read_shared_token(arguments.token_file)
    is_first = config.is_first_node(arguments, endpoint)
    going = find_run(arguments) if arguments.lease else None  # then node 0 was lost, and comes back
    if arguments.lease and going is None and has_finished(Path(arguments.run_dir)):
        print(f"relight: the run in {arguments.run_dir} has finished", file=sys.stderr, flush=True)
        return 0
    if going is not None:
        is_first, endpoint = False, read_address(Path(arguments.run_dir)) or endpoint
    tls = config.find_tls(arguments, endpoint, is_first=is_first)
    if not is_first:
        name = f"node-{arguments.node_rank}" if arguments.node_rank is not None else host_name()
        spare = is_spare(arguments)
        return join(endpoint, token, name, spare=spare, quiet=arguments.quiet, tls=tls, settings=going)
    config.hand_down_token_file(arguments)
    settings = config.build_settings(arguments, datetime.datetime.now())
    return launch(settings, token, quiet=arguments.quiet, dashboard=dashboard, tls=tls)


def _report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from relight.timeline.show import print_report

    run_dir = _find_run_dir(arguments.run_dir)
    return 0 if print_report(run_dir, Console()) else 1


def _explain_run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from relight.timeline.explain import explain
    from relight.watch.run import read_report

    run_dir = _find_run_dir(arguments.run_dir)
    found = read_report(run_dir)
    if isinstance(found, str):
        print(found)
        return 1
    console = Console()
    for number, paragraph in enumerate(explain(*found)):
        console.print(Text(("\n" if number else "") + paragraph), highlight=False)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from relight.server.records.journal import read_journal
    from relight.sim.judge.journal import check_journal

    run_dir = _find_run_dir(arguments.run_dir)
    path = run_dir / "journal.jsonl"
    try:
        header, lines = read_journal(path)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"the journal {path} cannot be read: {error}") from error
    is_over = (run_dir / "report.json").exists()
    wrong = check_journal(lines, header.settings.world_size, ended=is_over)
    for sentence in wrong:
        print(sentence)
    if not wrong:
        print(f"{len(lines)} lines of {path}: every invariant holds{'' if is_over else ' so far'}")
    return 1 if wrong else 0


def _timeline(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from relight.timeline.show import print_timeline

    run_dir = _find_run_dir(arguments.run_dir)
    if arguments.otlp:
        from relight.timeline.otel import send
        from relight.watch.run import read_report

        found = read_report(run_dir)
        if isinstance(found, str):
            raise UsageError(found)
        print(send(found[0], arguments.otlp))
        return 0
    files = {kind: getattr(arguments, kind) for kind in ("svg", "png", "html", "trace")}
    if any(files.values()):
        from relight.timeline.export import write_timeline

        for sentence in write_timeline(run_dir, step=arguments.step, recoveries=arguments.recoveries, **files):
            print(sentence)
        return 0
    shown = print_timeline(run_dir, Console(), step=arguments.step, recoveries=arguments.recoveries)
    return 0 if shown else 1


def _dashboard(arguments: argparse.Namespace) -> int:
    from relight.config import check_dashboard_address, read_page_token
    from relight.dashboard.__main__ import serve

    run_dir = _find_run_dir(arguments.run_dir)
    check_dashboard_address(arguments.address)
    token = read_page_token(arguments.token_file) if arguments.token_file else ""
    return serve(run_dir, arguments.address, token)


def _find_run_dir(asked: Path | None) -> Path:
    """The directory that was given, or that of the newest run."""
    if asked is None:
        from relight.watch.run_dir import find_run

        return find_run(None)
    if not asked.is_dir():
        raise UsageError(f"there is no run directory {asked}; `relight run` prints the path of each run")
    return asked


def _explain_words() -> int:
    from relight.chaos.plan import ACTION_WORDS, EXAMPLES, POINT_WORDS

    for title, meanings in (("actions", ACTION_WORDS), ("points", POINT_WORDS)):
        print(f"{title}:")
        for word, meaning in meanings.items():
            print(f"  {word.value:<16} {meaning}")
        print()
    print("sentences, for example:")
    for example in EXAMPLES:
        print(f'  --chaos "{example}"')
    return 0


# --- the parser ---------------------------------------------------------------------------------------------------
def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `relight`, with its commands."""
    parser = _Parser(
        prog="relight",
        description="Keeps synchronous data-parallel PyTorch training alive through failures, bit-identically.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = choices.add_parser("run", help="train a script, through failures", **_style("run"))
    chaos = choices.add_parser("chaos", help="run a script with faults on purpose", **_style("chaos"))
    chaos.add_argument("--explain", action="store_true", help="print every action and point, with examples, and exit")
    for command in (run, chaos):
        add_run_flags(command)
        command.set_defaults(call=_run)
    for add in (
        _add_report_commands,
        hosts_command.add_commands,
        slurm.add_command,
        _add_dashboard_command,
        prove_command.add_command,
        doctor_command.add_command,
        watch_command.add_commands,
        weights_command.add_commands,
        goodput_command.add_command,
    ):
        add(choices)
    return parser


def _add_report_commands(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add the commands that show one run from its directory."""
    report = choices.add_parser(
        "report",
        help="tables of a finished run: failures, decisions, costs",
        description="Print the failures of a finished run, the decision of each recovery, and the cost of each stage.",
    )
    check = choices.add_parser(
        "check",
        help="check that a run kept the recovery protocol",
        description="Judge a run's journal by the invariants of the recovery protocol (docs/PROTOCOL.md). "
        "Exit status: 0 all hold, 1 some do not.",
    )
    timeline = choices.add_parser(
        "timeline",
        help="draw what each rank did around each recovery",
        description="Draw what each rank did around each recovery: in the terminal, or into files.",
    )
    explain = choices.add_parser(
        "explain",
        help="say in sentences what failed, and why the recovery took so long",
        description="Tell in sentences what failed, why each recovery took as long as it did, and what would have made "
        "it faster. Works during the run, too.",
    )
    for command in (report, check, timeline, explain):
        watch_command.add_run_dir(command)
    report.set_defaults(call=_report)
    check.set_defaults(call=_check)
    explain.set_defaults(call=_explain_run)
    timeline.add_argument("--step", type=int, metavar="N", help="show what happened around this step")
    timeline.add_argument(
        "--recoveries", type=int, default=5, metavar="N", help="how many recoveries to draw; default 5"
    )
    for flag, text in (
        ("--svg", "write each figure to a file instead: --svg run.svg writes run.svg, run-2.svg, ..."),
        ("--png", "the same as pictures of 3300 pixels' width; needs relight[png]"),
        ("--html", "write a page that needs nothing else, with all figures and failures"),
        ("--trace", "write the whole job as a trace for https://ui.perfetto.dev or chrome://tracing"),
    ):
        timeline.add_argument(flag, metavar="FILE", type=Path, help=text)
    timeline.add_argument(
        "--otlp",
        metavar="URL",
        help="send the job, its recoveries and their stages as spans to an OpenTelemetry collector, for example "
        "http://localhost:4318; needs relight[otel]",
    )
    timeline.set_defaults(call=_timeline)


def _add_dashboard_command(choices: "argparse._SubParsersAction[Any]") -> None:
    dashboard = choices.add_parser(
        "dashboard",
        help="serve a page about a run, running or over",
        description="Serve a page about one run, and /metrics for Prometheus, from the files in its directory. "
        "Ctrl-C ends the page, not the run.",
    )
    watch_command.add_run_dir(dashboard)
    dashboard.add_argument("--address", default="", metavar="HOST:PORT", help=ADDRESS_HELP)
    dashboard.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token for an address that others can reach, for Prometheus; default: a new token each time",
    )
    dashboard.set_defaults(call=_dashboard)


def _style(command: str) -> dict[str, Any]:
    return {
        "usage": f"relight {command} [flags] SCRIPT [the script's own arguments]",
        "epilog": _EXAMPLE,
    }


class _Version(argparse.Action):
    """`--version`: looked up only if it is asked for, which no other command waits for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        try:
            version = metadata.version("relight")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"relight {version}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
