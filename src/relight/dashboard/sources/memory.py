"""Memory of the job's processes on this host, from /proc. Of processes elsewhere nothing is known here."""

import os
from pathlib import Path


class Memory:
    """Finds out once whether a pid of the journal is that process on this host, then only looks."""

    def __init__(self) -> None:
        self._ours: dict[str, int] = {}  # process to pid; 0: it is not here

    def rss_bytes(self, pids: dict[str, int]) -> dict[str, int]:
        """Resident memory of these processes, by name; those that are not here are left out."""
        self._ours = {name: pid for name, pid in self._ours.items() if name in pids}
        found = {}
        for name, pid in pids.items():
            if name not in self._ours and pid:
                self._ours[name] = pid if _is(pid, name) else 0
            if self._ours.get(name):
                try:
                    words = Path(f"/proc/{pid}/statm").read_bytes().split()
                    found[name] = int(words[1]) * os.sysconf("SC_PAGE_SIZE")
                except (OSError, IndexError, ValueError):
                    self._ours[name] = 0
        return found


def _is(pid: int, process: str) -> bool:
    """True if this is the job's process: the journal may come from another host, where the number means another."""
    try:
        return f"RELIGHT_PROCESS={process}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
