"""The `relight` command: reads arguments, calls the rooms below. No torch, nothing of training.

The flags of `relight run` are torchrun's where torchrun has them, so that a launch line can be kept.
"""

import argparse
import datetime
import difflib
import importlib.metadata
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from relight.core.report import JobReport
from relight.errors import UsageError
from relight.goodput import command as goodput_command
from relight.watch import command as watch_command
from relight.weights import command as weights_command
from relight.wire.handshake import NAME
from relight.wire.settings import JobSettings

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(JobSettings)}
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
  relight status
  relight report runs/train-20260101-120000
  relight dashboard runs/train-20260101-120000
  relight weights plan model.safetensors --devices 4
  relight simulate --devices 16384
"""


_ADDRESS_HELP = (
    "where to serve the page; default 127.0.0.1:7117, or another port if that one is taken. An address that others "
    "can reach is guarded by a token in the printed URL"
)


# Names that scripts hardly use for anything else.
_RELIGHTS_OWN = frozenset(
    {"--nproc-per-node", "--nproc_per_node", "--nnodes", "--standby", "--rdzv-endpoint", "--rdzv_endpoint", "--chaos"}
)
_LOGS = "the output of every worker goes to RUN_DIR/logs, and to the terminal; drop it"
# What torchrun has and relight has not, and what to do about it.
_TORCHRUN_FLAGS = {
    "--log-dir": "logs go to RUN_DIR/logs (--run-dir says where that is); drop it",
    "-r": _LOGS,
    "--redirects": _LOGS,
    "-t": _LOGS,
    "--tee": _LOGS,
    "--local-ranks-filter": _LOGS,
    "--logs-specs": _LOGS,
    "--local-addr": "a host's own address is found by itself, or by RELIGHT_HOST_ADDRESS; drop it",
    "--no-python": "workers are Python processes that relight starts itself; give the Python file, or a module with -m",
    "--run-path": "give the Python file as SCRIPT; drop it",
    "--start-method": "every worker is a new Python process; drop it",
    "--virtual-local-rank": "each worker finds its own device in job.device; drop it",
    "--numa-binding": "relight binds no processes to NUMA nodes; drop it, or run relight itself under numactl",
    "--event-log-handler": "`relight events` prints a job's events; drop it",
    "--signals-to-handle": "SIGINT, SIGTERM and SIGHUP are handled; drop it",
    "--duplicate-stdout-filters": _LOGS,
    "--duplicate-stderr-filters": _LOGS,
}


class _Parser(argparse.ArgumentParser):
    """Adds a hint to "unrecognized arguments": the nearest flag, and where the script's own flags go."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"relight: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser, commands = _make_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        commands[parsed.command].error(_unknown_hint(unknown[0], parsed.command, commands[parsed.command]))
    try:
        return int(parsed.call(parsed))
    except UsageError as error:
        print(f"relight: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # nothing was started yet, or it has been ended
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from relight import config
    from relight.launch import join, launch

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
    nodes = config.count_nodes(arguments.nnodes)
    endpoint = config.find_endpoint(arguments, nodes)
    _hint_at_misplaced_flags(arguments.script_and_arguments)
    if endpoint is None:
        if arguments.token_file:
            config.read_shared_token(arguments.token_file)  # of no use on one node, but a mistake in it is one
        tls = config.find_tls(arguments, (config.LOOPBACK, 0), is_first=True)
        settings = config.build_settings(arguments, datetime.datetime.now())
        return launch(settings, quiet=arguments.quiet, dashboard=dashboard, tls=tls)
    token = config.read_shared_token(arguments.token_file)
    is_first = config.is_first_node(arguments, endpoint)
    tls = config.find_tls(arguments, endpoint, is_first=is_first)
    if not is_first:
        name = f"node-{arguments.node_rank}" if arguments.node_rank is not None else _host_name()
        return join(endpoint, token, name, quiet=arguments.quiet, tls=tls)
    settings = config.build_settings(arguments, datetime.datetime.now())
    return launch(settings, token, quiet=arguments.quiet, dashboard=dashboard, tls=tls)


def _hint_at_misplaced_flags(script_and_arguments: Sequence[str]) -> None:
    """A script may have flags of these names too, so it is no error."""
    behind = {argument.partition("=")[0] for argument in script_and_arguments[1:]}
    for flag in sorted(behind & _RELIGHTS_OWN):
        print(
            f"relight: {flag} stands behind the script's name, so the script gets it; relight's own flags go before",
            file=sys.stderr,
            flush=True,
        )


def _agent(arguments: argparse.Namespace) -> int:
    from relight.config import find_tls, parse_endpoint, read_shared_token
    from relight.launch import join

    endpoint = parse_endpoint(arguments.controller, "--controller")
    name = arguments.name or _host_name()
    if not NAME.fullmatch(name):
        raise UsageError(f"--name {name}: use a-z, 0-9 and '-', at most 64 of them")
    token = read_shared_token(arguments.token_file)
    return join(endpoint, token, name, quiet=arguments.quiet, tls=find_tls(arguments, endpoint, is_first=False))


def _controller(arguments: argparse.Namespace) -> int:
    from relight.config import find_tls, parse_endpoint, read_shared_token
    from relight.launch import go_on

    _check_run_dir(arguments.run_dir)
    endpoint = parse_endpoint(arguments.listen, "--listen")
    token = read_shared_token(arguments.token_file)
    tls = find_tls(arguments, endpoint, is_first=True)
    return go_on(arguments.run_dir, endpoint, token, take_over=arguments.take_over, quiet=arguments.quiet, tls=tls)


def _host_name() -> str:
    """This host's name, in the letters that an agent's name may have."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname().lower())[:64]


def _report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from relight.timeline.show import print_report

    _check_run_dir(arguments.run_dir)
    return 0 if print_report(arguments.run_dir, Console()) else 1


def _explain_run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from relight.timeline.explain import explain
    from relight.timeline.load import load_report
    from relight.watch.run import JOURNAL, report_so_far

    run_dir = arguments.run_dir
    _check_run_dir(run_dir)
    loaded, unfinished = load_report(run_dir), ""
    if isinstance(loaded, str):
        if (run_dir / "report.json").exists() or not (run_dir / JOURNAL).exists():
            print(loaded)
            return 1
        loaded, unfinished = report_so_far(run_dir)
    console = Console()
    for number, paragraph in enumerate(explain(loaded, unfinished)):
        console.print(Text(("\n" if number else "") + paragraph), highlight=False)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from relight.server.journal import read_journal
    from relight.sim.journal import check_journal

    _check_run_dir(arguments.run_dir)
    path = arguments.run_dir / "journal.jsonl"
    try:
        header, lines = read_journal(path)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"the journal {path} cannot be read: {error}") from error
    is_over = (arguments.run_dir / "report.json").exists()
    wrong = check_journal(lines, header.settings.world_size, ended=is_over)
    for sentence in wrong:
        print(sentence)
    if not wrong:
        print(f"{len(lines)} lines of {path}: every invariant holds{'' if is_over else ' so far'}")
    return 1 if wrong else 0


def _timeline(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from relight.timeline.show import print_timeline

    _check_run_dir(arguments.run_dir)
    if arguments.otlp:
        from relight.timeline.otel import send

        print(send(_report_of(arguments.run_dir), arguments.otlp))
        return 0
    files = {kind: getattr(arguments, kind) for kind in ("svg", "png", "html", "trace")}
    if any(files.values()):
        from relight.timeline.export import write_timeline

        for sentence in write_timeline(
            arguments.run_dir, step=arguments.step, recoveries=arguments.recoveries, **files
        ):
            print(sentence)
        return 0
    shown = print_timeline(arguments.run_dir, Console(), step=arguments.step, recoveries=arguments.recoveries)
    return 0 if shown else 1


def _report_of(run_dir: Path) -> JobReport:
    """The report of a job, or what it would say by now. Raises UsageError."""
    from relight.timeline.load import load_report
    from relight.watch.run import JOURNAL, report_so_far

    loaded = load_report(run_dir)
    if not isinstance(loaded, str):
        return loaded
    if (run_dir / "report.json").exists() or not (run_dir / JOURNAL).exists():
        raise UsageError(loaded)
    return report_so_far(run_dir)[0]


def _dashboard(arguments: argparse.Namespace) -> int:
    from relight.config import check_dashboard_address, read_page_token
    from relight.dashboard.__main__ import serve

    _check_run_dir(arguments.run_dir)
    check_dashboard_address(arguments.address)
    token = read_page_token(arguments.token_file) if arguments.token_file else ""
    return serve(arguments.run_dir, arguments.address, token)


def _check_run_dir(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise UsageError(f"there is no run directory {run_dir}; `relight run` prints the path of each run")


def _explain_words() -> int:
    from relight.chaos.plan import ACTION_WORDS, EXAMPLES, POINT_WORDS

    print("actions:")
    for action, words in ACTION_WORDS.items():
        print(f"  {action.value:<16} {words}")
    print("\npoints:")
    for point, words in POINT_WORDS.items():
        print(f"  {point.value:<16} {words}")
    print("\nsentences, for example:")
    for example in EXAMPLES:
        print(f'  --chaos "{example}"')
    return 0


# --- the parser ---------------------------------------------------------------------------------------------------
def _make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="relight",
        description="Keeps synchronous data-parallel PyTorch training alive through failures, bit-identically.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"relight {_version()}")
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = choices.add_parser("run", help="train a script, through failures", **_style("run"))
    chaos = choices.add_parser("chaos", help="run with faults: see what a script survives", **_style("chaos"))
    chaos.add_argument("--explain", action="store_true", help="print every action and point, with examples, and exit")
    for command in (run, chaos):
        _add_run_arguments(command)
        command.set_defaults(call=_run)
    report = choices.add_parser("report", help="what a finished run went through", allow_abbrev=False)
    check = choices.add_parser(
        "check", help="whether the recovery protocol was kept, by the run's journal", allow_abbrev=False
    )
    timeline = choices.add_parser("timeline", help="who did what when in a finished run", allow_abbrev=False)
    explain = choices.add_parser(
        "explain", help="in sentences: what failed, and why it took so long", allow_abbrev=False
    )
    for command in (report, check, timeline, explain):
        command.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the directory of the run")
    report.set_defaults(call=_report)
    check.set_defaults(call=_check)
    explain.set_defaults(call=_explain_run)
    timeline.add_argument("--step", type=int, metavar="N", help="show what happened around this step")
    timeline.add_argument(
        "--recoveries", type=int, default=5, metavar="N", help="how many recoveries to draw; default 5"
    )
    for flag, text in (
        ("--svg", "write figures for papers instead, one file for each: FILE.svg, FILE-2.svg, ..."),
        ("--png", "the same as pictures of 3300 pixels' width; needs relight[png]"),
        ("--html", "write a page that needs nothing else, with all figures and failures"),
        ("--trace", "write the whole job as a trace for https://ui.perfetto.dev or chrome://tracing"),
    ):
        timeline.add_argument(flag, metavar="FILE", type=Path, help=text)
    timeline.add_argument(
        "--otlp",
        metavar="URL",
        help="send the job, its recoveries and their stages as spans to an OpenTelemetry collector, such as "
        "http://localhost:4318; needs relight[otel]",
    )
    timeline.set_defaults(call=_timeline)
    agent = choices.add_parser(
        "agent",
        help="let this host join a running job",
        description="Join a running job: this host gives room for standbys and replacements, until the job ends.",
        allow_abbrev=False,
    )
    agent.add_argument("--controller", required=True, metavar="HOST:PORT", help="the job's --rdzv-endpoint")
    agent.add_argument("--name", help="this host's name in the job; default: its host name")
    agent.add_argument("--quiet", action="store_true", help="show only the workers' output, warnings and errors")
    _add_token_file(agent)
    _add_tls(agent)
    agent.set_defaults(call=_agent)
    controller = choices.add_parser(
        "controller",
        help="go on with a job whose controller's host is gone",
        description="Run another controller of a job on several hosts, on a host that sees its run directory. Its "
        "agents look there for the controller's address. Training goes on meanwhile; the lost host's ranks are "
        "replaced. Ctrl-C ends the job, as with `relight run`.",
        allow_abbrev=False,
    )
    controller.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the job's, on storage that all hosts share")
    controller.add_argument(
        "--listen", required=True, metavar="HOST:PORT", help="where the job's hosts reach this controller"
    )
    controller.add_argument(
        "--take-over",
        action="store_true",
        help="also if the old controller still holds the journal's lock: it is frozen, or its host cannot be reached. "
        "Should it wake up, it finds that the journal is no longer its own, and ends without a word",
    )
    controller.add_argument("--quiet", action="store_true", help="show only warnings and errors")
    _add_token_file(controller)
    _add_tls(controller)
    controller.set_defaults(call=_controller)
    dashboard = choices.add_parser(
        "dashboard", help="a live page about a run, or about one that is over", allow_abbrev=False
    )
    dashboard.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the directory of the run")
    dashboard.add_argument("--address", default="", metavar="HOST:PORT", help=_ADDRESS_HELP)
    dashboard.add_argument(
        "--token-file",
        metavar="FILE",
        help="the token for an address that others can reach, instead of a new one each time: for Prometheus",
    )
    dashboard.set_defaults(call=_dashboard)
    commands: dict[str, argparse.ArgumentParser] = {
        "run": run,
        "chaos": chaos,
        "report": report,
        "check": check,
        "timeline": timeline,
        "dashboard": dashboard,
        "explain": explain,
        "agent": agent,
        "controller": controller,
    }
    for more in (watch_command.add_commands, weights_command.add_commands, goodput_command.add_command):
        commands = {**commands, **more(choices)}
    return parser, commands


def _style(command: str) -> dict[str, Any]:
    return {
        "usage": f"relight {command} [flags] SCRIPT [the script's own arguments]",
        "epilog": _EXAMPLE,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script_and_arguments", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=argparse.SUPPRESS)
    _add_launch_flags(parser.add_argument_group("launch, as with torchrun"))
    _add_job_flags(parser.add_argument_group("the job"))
    detection = parser.add_argument_group("noticing failures")
    _add_detection_flags(detection)
    _add_verify_flag(detection)
    _add_buddy_flag(detection)
    _add_slow_flags(detection)
    _add_retry_flags(parser.add_argument_group("giving up"))
    _add_chaos_flags(parser.add_argument_group("faults on purpose"))


def _add_launch_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("--nproc-per-node", "--nproc_per_node"),
        default="1",
        metavar="N",
        help="workers to start: a number, 'gpu', 'cpu', or 'auto' (one for each GPU, or else each core); default 1",
    )
    add("--nnodes", default="1", metavar="M", help="nodes; start the same command on each of them, as with torchrun")
    add(
        *("--node-rank", "--node_rank"),
        type=int,
        metavar="R",
        help="this node's number; the controller runs on node 0; default: where --rdzv-endpoint is one of the host's "
        "own addresses",
    )
    add(
        *("--rdzv-endpoint", "--rdzv_endpoint"),
        metavar="HOST:PORT",
        help="where the controller listens; default MASTER_ADDR:MASTER_PORT of several nodes; on one node it counts "
        "only with a --token-file, for other hosts to join",
    )
    add(*("--rdzv-backend", "--rdzv_backend"), metavar="NAME", help="accepted and needless")
    add(*("--rdzv-id", "--rdzv_id"), metavar="ID", help="accepted and needless")
    _add_token_file(group)
    _add_tls(group)
    add("--standalone", action="store_true", help="accepted and needless: a job on one node always stands alone")
    add("--role", metavar="NAME", help="accepted and needless")
    add(
        *("--monitor-interval", "--monitor_interval"),
        metavar="S",
        help="accepted and needless: deaths are told at once",
    )
    add(*("--rdzv-conf", "--rdzv_conf"), metavar="CONF", help="accepted and needless")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m")
    add(
        *("--master-addr", "--master_addr"),
        default=_DEFAULTS["master_address"],
        metavar="HOST",
        help="what the script finds in MASTER_ADDR; relight itself does not need it",
    )
    add(
        *("--master-port", "--master_port"),
        type=int,
        default=_DEFAULTS["master_port"],
        metavar="PORT",
        help="the same for MASTER_PORT",
    )


def _add_token_file(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="the secret that the hosts of a job share, the same file on each; default: RELIGHT_TOKEN_FILE",
    )


def _add_tls(group: argparse._ActionsContainer) -> None:
    """The names of `wire.tls.FLAGS`."""
    texts = {
        "--tls-ca": "speak TLS, and only with hosts whose certificate this authority has signed",
        "--tls-cert": "this host's certificate, for the name or address by which the others reach it",
        "--tls-key": "the key of --tls-cert",
    }
    for flag, text in texts.items():
        variable = f"RELIGHT_{flag.removeprefix('--').replace('-', '_').upper()}"
        group.add_argument(flag, metavar="PEM", help=f"{text}; default: {variable}")


def _add_job_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--standby",
        type=int,
        default=_DEFAULTS["standbys"],
        metavar="N",
        help="warm processes in reserve: with one, a lost rank is replaced without starting Python and torch",
    )
    add(
        "--run-dir",
        metavar="DIR",
        help="where journal, logs and report go; default "
        "runs/SCRIPT-DATE-TIME. One that holds a run which is over is used again: that run's files go to DIR/earlier-N",
    )
    add("--seed", type=int, default=_DEFAULTS["seed"], help="seed of each step's random streams; default 0")
    add("--controller-port", type=int, default=0, metavar="PORT", help="port of the controller; default: a free one")
    add("--oversubscribe", action="store_true", help="allow more than 16 processes for each core")
    add("--dashboard", action="store_true", help="serve a live page about the job on this machine, and print its URL")
    add("--dashboard-address", default="", metavar="HOST:PORT", help=f"the same, and {_ADDRESS_HELP}")
    add("--quiet", action="store_true", help="show only the workers' output, warnings and errors")


def _add_detection_flags(group: argparse._ArgumentGroup) -> None:
    texts = {
        "hang_timeout_seconds": "a rank without progress in a step, for which the others wait, is replaced after this "
        "long; grows by itself for jobs with long steps",
        "outside_hang_timeout_seconds": "the same for code between two steps, such as evaluation",
        "startup_timeout_seconds": "the same for the script up to the end of its first step",
        "frozen_timeout_seconds": "a process stopped by a signal (SIGSTOP) is replaced after this long",
        "agent_timeout_seconds": "a host whose agent cannot be reached for so long is lost, with all that it ran",
        "controller_timeout_seconds": "training goes on without a controller for so long; then it ends",
        "stop_timeout_seconds": "a survivor that does not stand still this long after a failure is replaced too",
        "restore_timeout_seconds": "a replacement must have the state of a healthy rank after this long; raise it for "
        "a large state over a slow network",
    }
    for name, text in texts.items():
        default = _DEFAULTS[name]
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=float, default=default, metavar="S", help=f"{text}; default {default:g}")


def _add_verify_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--verify-every",
        type=int,
        default=_DEFAULTS["verify_every"],
        metavar="K",
        help="every K steps compare the state of all ranks, bit for bit, before it is written; a rank that is outvoted "
        "(3 or more ranks) is replaced, since its memory was corrupted; default 0: only behind the first step, "
        "in recoveries and at the end",
    )


def _add_buddy_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--buddy-every",
        type=int,
        default=_DEFAULTS["buddy_every"],
        metavar="K",
        help="where the state is divided over ranks: every K steps each rank's part is copied into the host memory of "
        "another rank, as training.buddy(every=K) does, which counts if the script calls it; default 0: never",
    )


def _add_slow_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slow-factor",
        type=float,
        default=_DEFAULTS["slow_factor"],
        metavar="F",
        help="report a rank whose own work, waiting for others not counted, has long taken F times as long as that of "
        "the median rank; default %(default)s",
    )
    group.add_argument(
        "--slow-window-seconds",
        type=float,
        default=_DEFAULTS["slow_window_seconds"],
        metavar="S",
        help="it must be slow in three windows of so many seconds (and ten steps) in a row; default %(default)g",
    )
    group.add_argument(
        "--replace-slow", action="store_true", help="and have a warm standby take its rank, between two steps"
    )


def _add_retry_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        *("--max-failures", "--max-restarts", "--max_restarts"),
        type=int,
        default=None,
        metavar="N",
        help="end the job at failure N+1; default: never, since a failure costs one step",
    )
    add(
        "--max-failures-per-step",
        type=int,
        default=_DEFAULTS["max_failures_per_step"],
        metavar="N",
        help=f"end the job if one step fails more often; default {_DEFAULTS['max_failures_per_step']}",
    )


def _add_chaos_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--chaos",
        action="append",
        default=[],
        metavar="SENTENCE",
        help='a fault, such as "kill rank 2 in BACKWARD of step 13"; may be given many times; all words: '
        "relight chaos --explain",
    )
    add("--chaos-rate", type=float, default=0.0, metavar="P", help="a random fault in each step, with this probability")
    add("--chaos-seed", type=int, default=0, metavar="SEED", help="seed of those; the same seed, the same faults")


def _unknown_hint(flag: str, command: str, parser: argparse.ArgumentParser) -> str:
    torchruns = _TORCHRUN_FLAGS.get(flag.partition("=")[0].replace("_", "-"))
    if torchruns and command in ("run", "chaos"):
        return f"{flag} is torchrun's, and relight has no such flag: {torchruns}"
    known = [option for action in parser._actions for option in action.option_strings]
    word = flag.partition("=")[0]
    near = [option for option in known if option.startswith(word)] or difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    script = "Arguments of the script itself go after its name; " if command in ("run", "chaos") else ""
    return f"unknown argument {flag}; {hint}{script}--help lists {'the others' if script else 'all'}"


def _version() -> str:
    try:
        return importlib.metadata.version("relight")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
