"""What `relight run` was asked for, as one frozen value that every process of the job reads.

It lies in `settings.json` in the job's private directory (mode 0700), next to the token. Processes of the job
get the directory's path in RELIGHT_PRIVATE_DIR; secrets are never put on a command line or in an environment.

What differs from host to host is in the environment that the host's agent gives its workers: RELIGHT_HOST_ADDRESS.
"""

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from relight.core.fault import Plan

HOST_ADDRESS = "RELIGHT_HOST_ADDRESS"
Part = TypeVar("Part", bound=msgspec.Struct)
SUPERSEDED = 4  # exit status of a controller whose job another one has taken over


def host_address() -> str:
    """The address of this host at which workers serve their state to replacements on other hosts.

    One that those hosts can reach, such as 10.0.0.7. Empty (the default): a worker listens on no TCP port, and serves
    this host alone.
    """
    return os.environ.get(HOST_ADDRESS, "")


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one job. Defaults are the defaults of `relight run`."""

    job: str
    run_id: str = ""  # of this run alone, however often its name is used again
    script: str
    script_arguments: tuple[str, ...] = ()
    module: bool = False  # run `script` as a module, like torchrun -m
    no_python: bool = False  # run `script` itself, a program that becomes Python, like torchrun --no-python
    world_size: int = 1
    nodes: int = 1  # hosts that share the ranks
    standbys: int = 0
    run_dir: str = ""
    controller_address: str = "127.0.0.1"
    controller_port: int = 0  # chosen by the system, and written to `controller.json` in the private directory
    master_address: str = "127.0.0.1"
    master_port: int = 29500
    # failure detection
    hang_timeout_seconds: float = 30.0  # no progress inside a step while peers wait; grows with the job's step time
    outside_hang_timeout_seconds: float = 600.0  # the same between steps (evaluation, checkpoint)
    startup_timeout_seconds: float = 600.0  # from start to the first step, and for the first step itself
    frozen_timeout_seconds: float = 1.0  # stopped (SIGSTOP) for so long
    stop_timeout_seconds: float = 30.0  # a survivor that does not stand still by then has failed too
    restore_timeout_seconds: float = 120.0
    agent_timeout_seconds: float = 15.0  # a lost agent may come back for so long
    controller_timeout_seconds: float = 300.0  # training goes on without a controller for so long
    verify_every: int = 0  # steps from one comparison of the replicas' state to the next; 0: never
    buddy_every: int = 0  # steps from snapshot to snapshot where the script does not say; 0: none
    slow_factor: float = 1.5  # a rank whose own work takes so many times as long as the others' is said to be slow
    slow_window_seconds: float = 5.0  # of at least ten steps; three in a row make a slow rank
    replace_slow: bool = False
    # retries
    max_failures: int | None = None  # None: as many as happen
    max_failures_per_step: int | None = None  # None: for deaths from outside no limit; see core/stages/failing.py
    max_failed_attempts: int | None = None  # in a row, to start or restore a process; None: as many as happen
    max_identical_errors: int = 2  # the same exception at the same step: a bug, not a failure
    seed: int = 0
    plan: Plan = Plan()
    # `relight prove`
    stop_after: int = 0  # the job ends after so many steps, and the script does not go on after its loop; 0: it does
    repeat_check: bool = True  # compute a job's second step twice, and compare
    evidence: bool = False  # workers write down digests of each step, and touch no checkpoint and no logger
    traced_step: int = -1  # of this one also every operation


def part_of(kind: type[Part], settings: JobSettings) -> Part:
    """The part of the job's settings that a component of the core decides by."""
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
