"""Settings of a run: validates what was asked for before anything is started. No torch.

Every mistake is a UsageError that says what was asked, what is there, and which flag to change.
"""

import argparse
import datetime
import errno
import importlib.util
import itertools
import os
import re
import shutil
import socket
import stat
import sys
import uuid
from pathlib import Path

import msgspec

from relight.agent.connection.join import address_towards, resolve
from relight.chaos.plan import check_fault, parse_fault
from relight.cluster.place import DEFAULT_PORT, complete_flags
from relight.cluster.scontrol import expand_list
from relight.core.protocol.fault import Plan
from relight.dashboard.web.address import split_address
from relight.device.visible import count_devices
from relight.errors import UsageError
from relight.flags import read_setting, read_settings
from relight.server.records.claim import Claim, remove_unused
from relight.server.records.earlier import keep_aside
from relight.server.supply.choose import RAY, SLURM, TOKEN_FILE
from relight.wire.connection.loopback import IPV4, find_loopback, hand_down
from relight.wire.connection.tls import FLAGS, VARIABLES, Tls, TlsFiles, prove_certificate
from relight.wire.settings import JobSettings, host_address

MAX_WORKERS_PER_CORE = 16
LOOPBACK = IPV4
MIN_TOKEN_BYTES = 16
_claims: list[Claim] = []  # of this process's run directory, until the process ends
_PROBE_BYTES = 256 * 1024  # enough for the first lines of the journal, the trace and the report


def build_settings(arguments: argparse.Namespace, now: datetime.datetime) -> JobSettings:
    """Turn parsed arguments into the job's settings, and make its run directory. Raises UsageError."""
    local_size = count_workers(arguments.nproc_per_node or "1")
    hosts = count_nodes(arguments.nnodes)
    endpoint = find_endpoint(arguments, hosts)
    given = read_settings(arguments)
    check_supplier(given["supplier"], endpoint)
    nodes, spares = hosts - given["spare_nodes"], given["spare_nodes"] * local_size
    world_size = local_size * nodes
    given["standbys"] = given["standbys"] or spares
    check_fit(local_size + max(0, given["standbys"] - spares), arguments.oversubscribe)
    script = arguments.script_and_arguments[0] if arguments.script_and_arguments else ""
    check_script(script, module=arguments.module, no_python=arguments.no_python)
    check_preload(given["preload"], no_python=arguments.no_python)
    if endpoint is not None:
        given["controller_port"] = endpoint[1]
    settings = JobSettings(
        **given,
        job="",
        run_id=uuid.uuid4().hex[:8],
        script=script,
        script_arguments=tuple(arguments.script_and_arguments[1:]),
        world_size=world_size,
        nodes=nodes,
        controller_address=endpoint[0] if endpoint else LOOPBACK,
        plan=build_plan(arguments, world_size, given["standbys"]),
    )
    if endpoint is None:
        settings = _on_loopback(settings)
    run_dir = make_run_dir(arguments.run_dir, script, now)  # last: a mistake above leaves no directory
    return msgspec.structs.replace(settings, job=run_dir.name, run_dir=str(run_dir))


def _on_loopback(settings: JobSettings) -> JobSettings:
    """A job that keeps to this host: by IPv4, or by IPv6 where there is no other. Raises UsageError without both."""
    try:
        address = find_loopback()
    except OSError as error:
        raise UsageError(
            f"the loopback interface of this host carries no connection ({error.strerror or error}), and the processes "
            "of a job on one host talk through it; bring it up (ip link set lo up), or start the job outside of this "
            "network namespace"
        ) from error
    hand_down(address)
    master = address if settings.master_address == LOOPBACK else settings.master_address
    return msgspec.structs.replace(settings, controller_address=address, master_address=master)


def count_workers(asked: str) -> int:
    """The number of workers, spelt as for torchrun: a number, "cpu", "gpu", or "auto" (GPUs if there are any)."""
    if asked in ("auto", "cpu", "gpu"):
        gpus = count_devices()
        if asked == "gpu" and not gpus:
            raise UsageError("--nproc-per-node gpu: no GPU is visible; give a number, or 'cpu'")
        return gpus if gpus and asked != "cpu" else len(os.sched_getaffinity(0))
    try:
        count = int(asked)
    except ValueError:
        raise UsageError(f"--nproc-per-node {asked!r}: expected a number, 'auto', 'cpu' or 'gpu'") from None
    if count < 1:
        raise UsageError(f"--nproc-per-node {count}: a job needs at least one worker")
    return count


def complete_nodes(arguments: argparse.Namespace) -> int:
    """Complete the flags about nodes from the cluster's variables, and say so. Return the number of nodes.

    Raises UsageError for contradictions.
    """
    if read := complete_flags(arguments, os.environ, expand_list):
        print(f"relight: {read}", file=sys.stderr, flush=True)
    hosts, spares = count_nodes(arguments.nnodes), read_setting(arguments, "spare_nodes")
    if spares >= hosts:
        raise UsageError(f"--spare-nodes {spares} of {hosts} nodes: at least one must be left for the ranks")
    if arguments.node_rank is not None and not 0 <= arguments.node_rank < hosts:
        raise UsageError(f"--node-rank {arguments.node_rank} of {hosts} nodes: expected 0 to {hosts - 1}")
    return hosts


def count_nodes(asked: str | None) -> int:
    """The number of nodes: "M", or "M:M" as torchrun has it for a job that neither grows nor shrinks."""
    asked = asked or "1"
    least, colon, most = asked.partition(":")
    if not least.isdecimal() or (colon and most != least) or int(least) < 1:
        raise UsageError(f"--nnodes {asked}: expected a number of nodes; a job's ranks neither grow nor shrink")
    return int(least)


def find_endpoint(arguments: argparse.Namespace, nodes: int) -> tuple[str, int] | None:
    """Return where the controller of a job on several nodes listens; None for a job that keeps to this one.

    One node needs no endpoint, though launch lines for torchrun often have one. It counts if there is a secret for
    other hosts to join with.
    """
    if nodes == 1 and not (arguments.token_file or os.environ.get(TOKEN_FILE)):
        return None
    if arguments.rdzv_endpoint:
        return parse_endpoint(arguments.rdzv_endpoint, "--rdzv-endpoint")
    if nodes == 1:
        return None
    if arguments.master_address == LOOPBACK:
        raise UsageError(
            f"--nnodes {nodes}: say on every node where the first one is reached: --rdzv-endpoint HOST:PORT, or "
            "--master-addr HOST"
        )
    return arguments.master_address, read_setting(arguments, "master_port")


def parse_endpoint(text: str, flag: str) -> tuple[str, int]:
    """HOST:PORT; without a port, torchrun's."""
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UsageError(f"{flag} {text}: expected HOST:PORT, for example 10.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_first_node(arguments: argparse.Namespace, endpoint: tuple[str, int]) -> bool:
    """Return whether the controller runs here: on node rank 0, or on the host that has the endpoint's address."""
    if arguments.node_rank is not None:
        return int(arguments.node_rank) == 0
    try:
        family, kind, _, _, address = socket.getaddrinfo(endpoint[0], 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def read_shared_token(asked: str | None) -> bytes:
    """The secret that all hosts of a job share, from a file: --token-file, or RELIGHT_TOKEN_FILE."""
    path = asked or os.environ.get(TOKEN_FILE, "")
    if not path:
        raise UsageError(
            "several hosts need a secret that they share: put the same random file, readable by you alone, on every "
            "host (head -c 32 /dev/urandom | base64 > token; chmod 600 token) and give it with --token-file"
        )
    named = f"{'--token-file' if asked else TOKEN_FILE} {path}"
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise UsageError(f"{named} is no regular file")
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"{named}: {error.strerror or error}") from error
    if found.st_mode & 0o077 and not _is_lent_by_group(found):
        raise UsageError(f"{named} can be read by others; chmod 600 it")
    if len(token) < MIN_TOKEN_BYTES:
        raise UsageError(f"{named} holds {len(token)} bytes; at least {MIN_TOKEN_BYTES} are needed")
    return token


def _is_lent_by_group(found: os.stat_result) -> bool:
    """Return whether root has given a file to a group of this process to read, and no other may.

    So Kubernetes hands out a Secret under `fsGroup`: the process cannot change the mode of such a file.
    """
    is_ours = found.st_gid != 0 and found.st_gid in (os.getegid(), *os.getgroups())
    return found.st_uid == 0 and is_ours and found.st_mode & 0o077 == 0o040


def hand_down_token_file(arguments: argparse.Namespace) -> None:
    """Let the controller know where the shared secret lies, for hosts that are ordered."""
    if path := arguments.token_file or os.environ.get(TOKEN_FILE):
        os.environ[TOKEN_FILE] = str(Path(path).absolute())


def check_supplier(supplier: str, endpoint: tuple[str, int] | None) -> None:
    """Raise UsageError unless hosts that are ordered with `supplier` could join the job."""
    if not supplier:
        return
    if endpoint is None:
        raise UsageError(
            "--supplier: hosts that are ordered must reach this one; give --rdzv-endpoint HOST:PORT and --token-file"
        )
    if supplier == RAY and importlib.util.find_spec("ray") is None:
        raise UsageError("--supplier ray: Ray is not installed on this host; pip install 'relight[ray]'")
    if supplier == SLURM and shutil.which("sbatch") is None:
        raise UsageError("--supplier slurm: there is no sbatch on the PATH of this host")


def read_page_token(path: str) -> str:
    """The token of a dashboard, from a file. It becomes a part of an address and of a header. Raises UsageError."""
    token = read_shared_token(path).decode(errors="replace")
    if not re.fullmatch(r"[A-Za-z0-9+/=_.~-]+", token):
        raise UsageError(f"--token-file {path}: use letters, digits and +/=_.~- in one line")
    return token


def find_tls(arguments: argparse.Namespace, endpoint: tuple[str, int], *, is_first: bool) -> Tls | None:
    """This host's part in TLS, from flags or the environment; None if there is to be none. Raises UsageError.

    Its certificate must be good for the names by which the others reach it: of the endpoint, if the controller is here,
    and of the address at which its workers serve their state.
    """
    given = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    paths = [asked or os.environ.get(variable, "") for asked, variable in zip(given, VARIABLES, strict=True)]
    missing = [flag for flag, path in zip(FLAGS, paths, strict=True) if not path]
    if len(missing) == len(FLAGS):
        return None
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"TLS needs --tls-ca, --tls-cert and --tls-key together; {' and '.join(missing)} {are} missing"
        )
    files = TlsFiles(authority=paths[0], certificate=paths[1], key=paths[2])
    try:
        address = host_address() or (resolve(endpoint[0]) if is_first else address_towards(*endpoint))
    except OSError as error:
        raise UsageError(f"there is no way to {endpoint[0]}: {error.strerror or error}") from error
    return prove_certificate(files, *([endpoint[0]] if is_first else []), address)


def check_fit(processes: int, oversubscribe: bool) -> None:
    cores = len(os.sched_getaffinity(0))
    if processes > MAX_WORKERS_PER_CORE * cores and not oversubscribe:
        raise UsageError(f"this asks for {processes} workers on {cores} cores; pass --oversubscribe to insist")


def check_preload(modules: str, *, no_python: bool) -> None:
    """Raise UsageError unless `modules` are names of modules, with commas, for workers that Python runs."""
    if modules and no_python:
        raise UsageError("--preload is for scripts that Python runs: drop it, or --no-python")
    for name in modules.split(",") if modules else ():
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--preload {modules!r}: {name!r} is not the name of a module; for example: torch,numpy")


def check_script(script: str, *, module: bool, no_python: bool = False) -> None:
    """See that there is something to run, before anything is started for it."""
    if not script:
        raise UsageError("no script given; for example: relight run --nproc-per-node 4 --standby 1 train.py")
    if module and no_python:
        raise UsageError("-m is for a Python module, --no-python for a program of any kind: give one of them")
    if module:
        _check_module(script)
        return
    if no_python:
        if shutil.which(script) is None:
            raise UsageError(
                f"--no-python: there is no program {script} that can be run, neither on the PATH nor as "
                f"{Path(script).absolute()}; check the name, give a path with a / in it, or chmod +x it"
            )
        return
    path = Path(script)
    if path.is_dir():
        raise UsageError(f"{script} is a directory; give the path of a Python file (at {path.absolute()})")
    if not path.is_file():
        raise UsageError(f"there is no script {script} (at {path.absolute()}); check the path, or add -m for a module")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {script} cannot be read; check its permissions")


def _check_module(name: str) -> None:
    """Only the outermost package is looked up: finding an inner one would run the package's code."""
    top = name.partition(".")[0]
    try:
        found = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    if not found and not any((Path.cwd() / candidate).exists() for candidate in (top, f"{top}.py")):
        raise UsageError(f"-m {name}: there is no module {top} on the path or in {Path.cwd()}; check the name")


def build_plan(arguments: argparse.Namespace, world_size: int, standbys: int) -> Plan:
    """The faults asked for, checked against the size of the job."""
    faults = tuple(parse_fault(sentence) for sentence in arguments.chaos)
    for fault in faults:
        check_fault(fault, world_size, standbys)
    rate = arguments.chaos_rate
    if not 0.0 <= rate <= 1.0:
        raise UsageError(f"--chaos-rate {rate:g}: expected a probability per step, from 0 to 1")
    return Plan(faults=faults, seed=arguments.chaos_seed, rate_per_step=rate, world_size=world_size)


def check_dashboard_address(address: str) -> None:
    """Raises UsageError if the page cannot be served at "HOST:PORT" as it is written."""
    try:
        host, _ = split_address(address)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"dashboard address {address!r}: there is no host {host} ({error.strerror or error})"
        ) from None


def make_run_dir(asked: str | None, script: str, now: datetime.datetime) -> Path:
    """Make the run's directory, and prove that it can be written by writing. An earlier run's files are kept aside."""
    if asked == "":  # Path("") is the current directory
        raise UsageError("--run-dir '': expected a directory; for the current one: --run-dir .")
    is_new = asked is None
    run_dir = Path(asked or "").absolute()
    try:
        if asked is None:
            run_dir = _fresh_run_dir(Path("runs").absolute(), f"{Path(script).stem}-{now:%Y%m%d-%H%M%S}")
        else:
            is_new = _make_directory(run_dir)
        _claims.append(Claim(run_dir))
        _write_probe(run_dir)
        aside = keep_aside(run_dir)
    except OSError as error:
        if is_new:
            remove_unused(run_dir)
        raise UsageError(_run_dir_problem(run_dir, error)) from error
    if aside is not None:
        print(f"relight: the files of the earlier run in {run_dir} are kept in {aside}", file=sys.stderr, flush=True)
    return run_dir


def _fresh_run_dir(parent: Path, name: str) -> Path:
    """Make a directory that no other process has made. Raises OSError."""
    candidates = (parent / (f"{name}-{number}" if number > 1 else name) for number in itertools.count(1))
    return next(path for path in candidates if _make_directory(path))


def _make_directory(path: Path) -> bool:
    """False: it was there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    return True


def _write_probe(run_dir: Path) -> None:
    """A full disk often shows only when bytes are really written, and forced out."""
    probe = run_dir / f".probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _run_dir_problem(run_dir: Path, error: OSError) -> str:
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.EEXIST: "something that is no directory is in the way",
        errno.ENOTDIR: "something that is no directory is in the way",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return f"cannot write the run directory {run_dir}: {reason}; choose another with --run-dir"
