"""The settings of a job, as one frozen value that every process of the job reads.

It lies in `settings.json` in the job's private directory (mode 0700), next to the token. Processes of the job
get the directory's path in RELIGHT_PRIVATE_DIR; secrets are never put on a command line or in an environment.

What differs from host to host is in the environment that the host's agent gives its workers: RELIGHT_HOST_ADDRESS.
"""

import os
import signal
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from relight.core.protocol.fault import Plan
from relight.wire.option import Option

# Groups of flags, as --help lists them.
LAUNCH = "launch, as with torchrun"
JOB = "the job"
DETECTION = "noticing failures"
VERIFICATION = "finding corrupted memory, and scripts that cannot be repeated"
BUDDIES = "keeping a divided state"
STRAGGLERS = "slow ranks"
GIVING_UP = "giving up"
SUPPLY = "hosts from the cluster"

HOST_ADDRESS = "RELIGHT_HOST_ADDRESS"
FIRST_NODE = "node-0"  # the agent of the host on which the job's controller was started
Part = TypeVar("Part", bound=msgspec.Struct)
END_BY_HAND = "relight end"  # the reason of a job that is ended by this command
CONTROLLER_LOST = 3  # exit status of an agent that its controller has left for good
SUPERSEDED = 4  # exit status of a controller whose job another one has taken over
HAND_OVER = signal.SIGUSR1  # tells a controller to leave the job to one on another host


def host_address() -> str:
    """The address of this host at which workers serve their state to replacements on other hosts.

    One that those hosts can reach, such as 10.0.0.7. Empty (the default): a worker listens on no TCP port, and serves
    this host alone.
    """
    return os.environ.get(HOST_ADDRESS, "")


def _seconds(group: str, text: str) -> Option:
    return Option(group, text, metavar="SECONDS", noun="number of seconds", above=0)


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a job's settings about the cluster's hosts: which are ordered, and where the controller may be."""

    supplier: Annotated[
        str,
        Option(
            SUPPLY,
            "replace lost hosts by new ones: 'slurm' submits `relight agent` as a job of one node, 'ray' starts it in "
            "an actor with one CPU (python -m relight.integrations.ray_order --num-gpus N has more); anything else is "
            "a command for the shell, which finds in its environment RELIGHT_ACTION (order or cancel), RELIGHT_ORDER, "
            "RELIGHT_CONTROLLER, RELIGHT_TOKEN_FILE and RELIGHT_EXCLUDE. To order, it starts `relight agent "
            "--controller $RELIGHT_CONTROLLER --name $RELIGHT_ORDER` on another host and prints one line, a word of "
            "its own for the order, which it finds in RELIGHT_ORDER_ID to cancel",
            metavar="slurm|ray|COMMAND",
            unset="none, the job gets along with the hosts that it has",
        ),
    ] = ""
    supply_spares: Annotated[
        int | None,
        Option(
            SUPPLY,
            "order hosts until there are so many beside the nodes that hold the job's ranks at the start",
            metavar="K",
            least=0,
            unset="as many as there were once; so each lost host is replaced",
        ),
    ] = None
    supply_timeout_seconds: Annotated[
        float, _seconds(SUPPLY, "cancel an order after this long without its host, and place another one")
    ] = 3600.0
    supply_idle_seconds: Annotated[
        float,
        _seconds(SUPPLY, "give an ordered host back after this long without a rank, if more are here than are wanted"),
    ] = 600.0
    lease: Annotated[
        str,
        Option(
            SUPPLY,
            "let the controller move when its host is lost: any host of the job takes it over once it holds this Lease "
            "of Kubernetes, and continues from the journal. Wants a --run-dir on storage that all hosts share, and "
            "pods whose service account may get and update the Lease. 'file' keeps it in a file of the run directory, "
            "as for Slurm, which is asked whether a host that hears no other one still belongs to the job",
            metavar="file|[NAMESPACE/]NAME",
            unset="none, the controller stays on the first host",
        ),
    ] = ""
    lease_seconds: Annotated[
        int,
        Option(
            SUPPLY,
            "how long the holder of the --lease must be silent before another host takes it over",
            metavar="SECONDS",
            least=3,
        ),
    ] = 15
    controller_moves: Annotated[
        bool,
        Option(
            SUPPLY,
            "leave the job, and do not end it, when `relight run` on the first host is killed: something else starts "
            "`relight controller` on another host then",
        ),
    ] = False
    fault_status: Annotated[
        int,
        Option(
            SUPPLY,
            "exit status on a host that is left since its hardware has reported a fault, such as a GPU that is lost; "
            "a cluster that starts such hosts again, and elsewhere, wants one above 0",
            metavar="STATUS",
            least=0,
        ),
    ] = 0

    @property
    def staying_host(self) -> str:
        """The agent of the host that cannot leave, as the controller is there and cannot move; empty: all can."""
        return "" if self.lease else FIRST_NODE

    @property
    def has_successors(self) -> bool:
        """True if another host takes the controller over when this one's is lost."""
        return bool(self.lease) or self.controller_moves


class JobSettings(ClusterSettings, frozen=True, kw_only=True):
    """The settings of one job. A field that is an Option is a flag of `relight run`, declared here and nowhere else."""

    job: str
    run_id: str = ""  # of this run alone, however often its name is used again
    script: str
    script_arguments: tuple[str, ...] = ()
    module: Annotated[
        bool, Option(LAUNCH, "SCRIPT is the name of a module, as with python -m", flags=("-m", "--module"))
    ] = False
    no_python: Annotated[
        bool,
        Option(
            LAUNCH,
            "SCRIPT is a program, run as it is. It must become the Python process that calls "
            "relight.init(): a shell script ends with `exec python train.py`",
            flags=("--no-python", "--no_python"),
        ),
    ] = False
    master_address: Annotated[
        str,
        Option(
            LAUNCH,
            "value of MASTER_ADDR for the script; relight itself uses it only with several nodes and "
            "no --rdzv-endpoint",
            flags=("--master-addr", "--master_addr"),
            metavar="HOST",
        ),
    ] = "127.0.0.1"
    master_port: Annotated[
        int,
        Option(
            LAUNCH,
            "value of MASTER_PORT for the script",
            flags=("--master-port", "--master_port"),
            metavar="PORT",
            noun="port number",
            least=1,
            most=65535,
        ),
    ] = 29500
    world_size: int = 1
    nodes: int = 1  # hosts that share the ranks
    spare_nodes: Annotated[
        int,
        Option(
            LAUNCH,
            "of the --nnodes, the last K hold no rank: they are spares, with warm standbys for the ranks of nodes that "
            "are lost",
            flags=("--spare-nodes", "--spare_nodes"),
            metavar="K",
            least=0,
        ),
    ] = 0
    standbys: Annotated[
        int,
        Option(
            JOB,
            "processes in reserve, which take lost ranks without starting Python and torch: warm, with the model "
            "built, on a device of their own; or lean, if each rank has a device and they have none to themselves: "
            "such a one builds when it takes a rank, on that rank's device, and needs no memory of a device before",
            flags=("--standby",),
            least=0,
            unset="as many as the --spare-nodes have room for, else 0",
        ),
    ] = 0
    preload: Annotated[
        str,
        Option(
            JOB,
            "import these modules once on each host, and fork workers of the process that did: a new worker is "
            "there at once instead of after seconds of importing. For modules that start no threads and touch no "
            "device when they are imported, such as torch",
            metavar="MODULE,...",
            unset="each worker imports what it needs",
        ),
    ] = ""
    run_dir: str = ""
    seed: Annotated[int, Option(JOB, "seed of the random streams of each step", metavar="SEED")] = 0
    controller_address: str = "127.0.0.1"
    # 0: chosen by the system, and written to `controller.json` in the private directory
    controller_port: Annotated[
        int,
        Option(
            JOB, "port of the controller", metavar="PORT", noun="port number", least=0, most=65535, unset="a free one"
        ),
    ] = 0
    # --- noticing failures
    hang_timeout_seconds: Annotated[
        float,
        _seconds(
            DETECTION,
            "replace a rank after this long without progress inside a step, while others wait for it; "
            "grows by itself for jobs with long steps",
        ),
    ] = 30.0
    outside_hang_timeout_seconds: Annotated[
        float, _seconds(DETECTION, "the same between two steps, for example in an evaluation")
    ] = 600.0
    startup_timeout_seconds: Annotated[
        float, _seconds(DETECTION, "the same from the start of the script to the end of its first step")
    ] = 600.0
    frozen_timeout_seconds: Annotated[
        float, _seconds(DETECTION, "replace a process after it was stopped by a signal (SIGSTOP) for this long")
    ] = 1.0
    agent_timeout_seconds: Annotated[
        float,
        _seconds(DETECTION, "give up a host, with all its processes, after silence for this long"),
    ] = 15.0
    controller_timeout_seconds: Annotated[
        float, _seconds(DETECTION, "continue without a controller for this long; then end the job")
    ] = 300.0
    stop_timeout_seconds: Annotated[
        float, _seconds(DETECTION, "replace a survivor too if it has not paused this long after a failure")
    ] = 30.0
    restore_timeout_seconds: Annotated[
        float,
        _seconds(
            DETECTION,
            "time limit for the copy of a healthy rank's state to a replacement; raise it for a large "
            "state over a slow network",
        ),
    ] = 120.0
    verify_every: Annotated[
        int,
        Option(
            VERIFICATION,
            "compare the state of all ranks bit for bit every so many steps, before the write; a rank "
            "that is outvoted (with 3 or more ranks) is replaced, since its memory was corrupted",
            metavar="STEPS",
            least=0,
            unset="0, only at the second step, in recoveries and at the end",
        ),
    ] = 0
    repeat_check: Annotated[
        bool,
        Option(
            VERIFICATION,
            "do not compute the second step of the job twice. By default relight does, and compares "
            "the bits, to find scripts that a recovery could not repeat. For devices whose operations "
            "are not deterministic",
            flags=("--no-repeat-check",),
            inverted=True,
        ),
    ] = True
    buddy_every: Annotated[
        int,
        Option(
            BUDDIES,
            "for state that is divided over ranks: copy each rank's part into the host memory of "
            "another rank every so many steps. training.buddy(every=K) in the script takes precedence",
            metavar="STEPS",
            least=0,
            unset="0, never",
        ),
    ] = 0
    slow_factor: Annotated[
        float,
        Option(
            STRAGGLERS,
            "report a rank whose own work, without waiting for others, takes F times as long as that "
            "of the median rank",
            metavar="F",
            noun="number",
            above=1,
        ),
    ] = 1.5
    slow_window_seconds: Annotated[
        float,
        _seconds(STRAGGLERS, "length of a window; a rank is slow after three in a row, of ten steps or more each"),
    ] = 5.0
    replace_slow: Annotated[bool, Option(STRAGGLERS, "replace such a rank by a warm standby, between two steps")] = (
        False
    )
    # --- giving up
    max_failures: Annotated[
        int | None,
        Option(
            GIVING_UP,
            "end the job at failure N+1",
            flags=("--max-failures", "--max-restarts", "--max_restarts"),
            least=0,
            unset="never, since a failure costs one step",
        ),
    ] = None
    max_failures_per_step: Annotated[
        int | None,
        Option(
            GIVING_UP,
            "end the job if one step fails more often, for any reason",
            least=1,
            unset="10 for failures that the script may cause (exceptions, hangs, broken collectives), no limit for "
            "failures from outside (signals, exits, freezes, lost hosts)",
        ),
    ] = None
    max_failed_attempts: Annotated[
        int | None,
        Option(
            GIVING_UP,
            "end the job after N failed attempts in a row to replace a rank (a process lost before it "
            "had finished a step, or a restore that broke). After three failed attempts the next ones "
            "begin after pauses of 1, 2, 4, ... s, at most 60",
            least=1,
            unset="never, as long as an intact replica is left",
        ),
    ] = None
    max_identical_errors: int = 2  # the same exception at the same step: a bug, not a failure
    plan: Plan = Plan()
    # --- `relight prove` and `relight doctor`
    stop_after: int = 0  # the job ends after so many steps, with the loop; 0: the script continues after its loop
    evidence: bool = False  # workers write down digests of each step
    traced_step: int = -1  # of this one also every operation
    examined: bool = False  # workers write down what they protect

    @property
    def is_trial(self) -> bool:
        """True if workers touch none of the user's checkpoints and loggers."""
        return self.evidence or self.examined


def part_of(kind: type[Part], settings: JobSettings) -> Part:
    """Return the settings that a component of the core needs."""
    return kind(**{name: getattr(settings, name) for name in kind.__struct_fields__})


def encode_settings(settings: JobSettings) -> bytes:
    """The text of `settings.json`."""
    return msgspec.json.encode(settings)


def decode_settings(text: bytes) -> JobSettings:
    """The inverse. Raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=JobSettings)


def read_settings(private_dir: str | Path) -> JobSettings:
    """Read `settings.json` of a job. Raises OSError or msgspec.ValidationError."""
    return decode_settings((Path(private_dir) / "settings.json").read_bytes())
