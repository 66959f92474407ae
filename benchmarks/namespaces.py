"""Hosts on one machine: network namespaces on one switch, each with an address and, if wanted, a limited line.

Needs root and iproute2. Nothing outside the namespaces is changed, and they go with the ``with`` block, however it
ends; those of a process that was killed are removed by the next one that makes some.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
CONGESTION = "cubic"  # Linux's default; for every way alike, whatever the machine's own setting
_PREFIX = "relight-net"
_BURST_BYTES = 2**18
_QUEUE_MS = 20
_CLONE_NEWNET = 0x40000000


def missing() -> str:
    """Return the reason why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with Network(["probe"]):
            return ""
    except FileNotFoundError as error:
        return f"the command {error.filename} is not installed (iproute2 has it)"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


class Network:
    """One namespace for each host, and one for the switch between them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """Raises FileNotFoundError or subprocess.CalledProcessError if this machine does not allow it."""
        self._own = f"{_PREFIX}-{os.getpid()}"
        self._switch = f"{self._own}-switch"
        self.namespaces = {host: f"{self._own}-{host}" for host in hosts}
        self.addresses = {host: f"10.213.0.{number}" for number, host in enumerate(hosts, 1)}
        _remove_abandoned()
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, (host, namespace) in enumerate(self.namespaces.items()):
            address, port = self.addresses[host], f"port{number}"
            _ip("netns", "add", namespace)
            _ip("link", "add", INTERFACE, "netns", namespace, "type", "veth", "peer", port, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", namespace, "link", "set", INTERFACE, "up")
            route = ("10.213.0.0/24", "dev", INTERFACE, "src", address)
            _ip("-n", namespace, "route", "change", *route, "congctl", CONGESTION)

    def limit(self, host: str, megabits: float | None) -> None:
        """Let this host send no faster than this many megabits each second. None: as fast as it can."""
        device = ("-n", self.namespaces[host], "qdisc")
        if megabits is None:
            with contextlib.suppress(subprocess.CalledProcessError):  # there was no limit
                _run("tc", *device, "delete", "dev", INTERFACE, "root")
            return
        tbf = ("tbf", "rate", f"{megabits:g}mbit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")
        _run("tc", *device, "replace", "dev", INTERFACE, "root", *tbf)

    def close(self) -> None:
        """Remove everything. Processes that are left in the namespaces are killed: they were started for them."""
        for namespace in (*self.namespaces.values(), self._switch):
            _remove(namespace)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def enter(namespace: str) -> None:
    """Move this process into a namespace; before it starts threads or makes sockets. Raises OSError."""
    descriptor = os.open(Path("/run/netns") / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter {namespace}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def _remove_abandoned() -> None:
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if name.startswith(f"{_PREFIX}-") and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(name)


def _remove(namespace: str) -> None:
    """Never raises: it may never have been made."""
    with contextlib.suppress(subprocess.CalledProcessError, OSError):
        for pid in _ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(subprocess.CalledProcessError, OSError):
        _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
