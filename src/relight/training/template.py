"""The template process of a host: imports modules once, then forks workers that need not import them again.

    python -P -m relight.training.template DESCRIPTOR MODULE,MODULE,...
    python -P -m relight.training.template PATH MODULE,MODULE,...

Started by the agent (agent.template) for `relight run --preload`, with one end of a socket as an inherited
descriptor; or by hand for many short jobs of one user on one host, whose agents have PATH, of a socket that is made
there, in RELIGHT_TEMPLATE: each of them gets a fork of this process as its own template process. It must have one
thread: a fork copies only the thread that calls it, and locks that others hold stay locked. The idea is that of
multiprocessing's fork server and of Android's zygote.
"""

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from relight.errors import MissingInterfaceError
from relight.training import bootstrap
from relight.wire import template

# What a worker imports in its first steps.
_OF_WORKERS = (
    "relight.training.job",
    "relight.training.training",
    "relight.training.wrappers",
    "torch._dynamo",  # DistributedDataParallel does so
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
_ENV_START, _ENV_END = 50, 51  # numbers of fields in proc_pid_stat(5)
_FIRST_FIELD = 3  # after the name, which may contain anything


def main() -> None:
    """Serve the agent; return only in a worker, and run the user's script there."""
    where, modules = sys.argv[1:]
    refusal = preload([name for name in modules.split(",") if name])
    # The C library's environment must not point into the area that workers overwrite.
    for name, value in list(os.environ.items()):
        os.environ[name] = value
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page that it looks at
    agent = socket.socket(fileno=int(where)) if where.isdecimal() else listen(where)
    _send(agent, template.Ready(refusal))
    serve(agent)
    bootstrap.main()


def preload(modules: list[str]) -> str:
    """Import the modules, and what a worker of relight needs; return why this process must not be forked, or ""."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"the module {name} cannot be imported: {type(error).__name__}: {error}"
    try:
        for name in _OF_WORKERS:
            importlib.import_module(name)
    except MissingInterfaceError as error:
        return str(error)
    threads = len(os.listdir("/proc/self/task"))
    return f"{', '.join(modules)} started {threads - 1} thread(s)" if threads > 1 else ""


def listen(path: str) -> socket.socket:
    """Wait for agents of this user; return in a fork of this process for each of them, with its connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the forks
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        before = os.umask(0o177)  # for this user alone
        listener.bind(f"{path}.new")
        os.umask(before)
        listener.listen()
        os.rename(f"{path}.new", path)  # a socket that is there can be connected to
        while True:
            agent, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return agent
            agent.close()


def serve(agent: socket.socket) -> None:
    """Carry out the agent's orders; end with the agent. Returns in each worker."""
    decoder = msgspec.json.Decoder(template.Order)
    while True:
        message, descriptors, _, _ = socket.recv_fds(agent, template.MOST_BYTES, template.MOST_DESCRIPTORS)
        if not message:  # the agent is gone: whatever adopts the workers reaps them
            os._exit(0)
        match decoder.decode(message):
            case template.Fork() as order:
                pid = os.fork()
                if pid == 0:
                    agent.close()
                    become(order, descriptors)
                    return
                for descriptor in descriptors:
                    os.close(descriptor)
                _send(agent, template.Forked(pid))
            case template.Reap(pid):
                os.waitpid(pid, 0)


def become(order: template.Fork, descriptors: list[int]) -> None:
    """Make this process, just forked, what `subprocess` would have started."""
    os.setsid()
    os.chdir(order.directory)
    go, out, err, *passed = descriptors
    if os.read(go, 1) != template.GO:
        os._exit(0)
    os.close(go)
    for received, standard in ((out, 1), (err, 2)):
        os.dup2(received, standard)
        os.close(received)
    environment = renumber(order.environment, dict(zip(order.numbers, passed, strict=True)))
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    show_environment(environment)
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # a process of its own would have been seeded by the system; `random` sees to it by itself
        numpy.random.seed()


def renumber(environment: Mapping[str, str], numbers: Mapping[int, int]) -> dict[str, str]:
    """Return the environment with the numbers that descriptors have in this process."""
    result = dict(environment)
    for name in template.DESCRIPTOR_VARIABLES:
        listed = [number for number in result.get(name, "").split(",") if number]
        result[name] = ",".join(str(numbers[int(number)]) for number in listed)
    return result


def show_environment(environment: Mapping[str, str]) -> None:
    """Let /proc/PID/environ show `environment`, relight's variables first, as far as there is room.

    An agent that takes over a host's workers, and `ps`, read there who a process is. The area is the one of the
    environment that this process was started with; nothing may point into it any more.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = (int(fields[number - _FIRST_FIELD]) for number in (_ENV_START, _ENV_END))
    text = b""
    for name, value in sorted(environment.items(), key=lambda pair: not pair[0].startswith("RELIGHT_")):
        entry = os.fsencode(f"{name}={value}") + b"\0"
        if len(text) + len(entry) <= end - start:
            text += entry
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _send(agent: socket.socket, answer: template.Answer) -> None:
    try:
        agent.sendall(msgspec.json.encode(answer))
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
