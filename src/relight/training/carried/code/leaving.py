"""The way a script leaves a loop: by `break` or `return`, or by an exception that is on its way out."""

import dis
import inspect
from types import FrameType

_DROPPING = frozenset({"POP_TOP", "POP_ITER"})  # what `break` and `return` do with the iterator of their loop
_YIELDING = frozenset({"YIELD_VALUE", "RESUME"})


def is_left_by_break(frame: FrameType | None) -> bool:
    """Return whether a loop is left by `break` or `return`, seen from its iterator, which is being closed.

    False: an exception may be on its way out of the loop; or something else held the iterator, so that the code after
    the loop has run.

    Args:
        frame: that was running when the iterator was closed. If it is a generator that is being closed itself (around
            the loop, for a progress bar), the frame that closed it is looked at.
    """
    while frame is not None:
        code = frame.f_code
        instruction = dis.opname[code.co_code[frame.f_lasti]]
        if instruction in _DROPPING:
            return True
        if not (code.co_flags & inspect.CO_GENERATOR and instruction in _YIELDING):
            return False
        frame = frame.f_back
    return False
