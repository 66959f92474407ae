"""`python -P shared_template.py PARENT PATH MODULES`: one template process for the jobs of many tests.

A fork is in the network and the mount namespace of the agent that it is for, as if that agent had started it.
"""

import ctypes
import os
import socket
import struct
import sys
from pathlib import Path

from relight.parent import end_with_parent
from relight.training import template

_KINDS = {"net": 0x40000000, "mnt": 0x00020000}  # CLONE_NEWNET, CLONE_NEWNS
_listen = template.listen


def main() -> None:
    end_with_parent(int(sys.argv.pop(1)))
    template.listen = listen
    template.main()


def listen(path: str) -> socket.socket:
    """As the template process does; return in a fork that has joined its agent."""
    agent = _listen(path)
    pid, _, _ = struct.unpack("3i", agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if kinds := sum(kind for name, kind in _KINDS.items() if _namespace(name, pid) != _namespace(name, "self")):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(os.pidfd_open(pid), kinds):
            raise OSError(ctypes.get_errno(), "cannot join the agent's namespaces")
    return agent


def _namespace(name: str, pid: int | str) -> str:
    return os.readlink(Path("/proc", str(pid), "ns", name))


if __name__ == "__main__":
    main()
