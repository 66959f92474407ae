"""Messages that a script receives from other processes by `multiprocessing`: environments that run in them, say.

What such a process holds is neither undone with a step nor carried to a replacement, which has processes of its own.
"""

import functools
import sys
import threading
from types import FrameType
from typing import Any

_LIBRARIES = ("torch.utils.data.", "concurrent.futures.")  # load batches, or compute what they were asked to
_RECEIVE = "_recv_bytes"  # all methods that receive call it; a queue has kept these methods since it was made
_count = 0  # by the main thread of this process


def received() -> int:
    """Return how many messages the script has received since this was first asked, or libraries that it calls."""
    module = sys.modules.get("multiprocessing.connection")
    if module is not None and not hasattr(receive := getattr(module.Connection, _RECEIVE), "__wrapped__"):
        setattr(module.Connection, _RECEIVE, _counted(receive))
    return _count


def _counted(receive: Any) -> Any:
    @functools.wraps(receive)
    def counted(connection: Any, *arguments: Any) -> Any:
        global _count  # noqa: PLW0603
        message = receive(connection, *arguments)
        if threading.current_thread() is threading.main_thread() and _is_of_script(sys._getframe(1)):
            _count += 1
        return message

    return counted


def _is_of_script(frame: FrameType | None) -> bool:
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(("multiprocessing.", "torch.multiprocessing")):
            return not module.startswith(_LIBRARIES)
        frame = frame.f_back
    return False
