"""Operations launched in a backward pass: its end waits for them, in the thread that runs it.

DDP's reducer asks for the future of each bucket's reduction, and waits for all of them when the backward pass is over.
A future that can be abandoned has to be completed by Python, on gloo's thread, which then takes the interpreter
from the backward pass, and the processor from other ranks. So within a backward pass the reducer is given gloo's own
future; and in front of the reducer's own wait stands one that ends with the generation. By the time that the reducer
waits there is nothing left to wait for.
"""

import functools
from typing import Protocol

from relight.training.torch_private.autograd import at_end_of_backward, current_backward, not_compiled

_NONE = -1


class Waitable(Protocol):
    """An operation under way."""

    def await_end(self) -> None:
        """Returns once it is done. Raises if it failed, or its generation was closed."""


class Backward:
    """Operations of one group in the present backward pass."""

    def __init__(self) -> None:
        self._current = _NONE
        self._operations: list[Waitable] = []

    def adopt(self, operation: Waitable) -> bool:
        """Have the present backward pass wait for an operation. Returns False if there is no such pass.

        The reducer queues its own wait after the last launch, so each of ours comes before it. A nested pass
        (checkpointing of activations) ends by itself, and waits for its own.
        """
        current = current_backward()
        if current == _NONE:
            return False
        if current != self._current:
            self._current, self._operations = current, []
            at_end_of_backward(functools.partial(self._end, self._operations))
        self._operations.append(operation)
        return True

    def last(self) -> Waitable | None:
        """Return the operation that the present backward pass has adopted last, or None."""
        return self._operations[-1] if self._operations and self._current == current_backward() else None

    @not_compiled
    def _end(self, operations: list[Waitable]) -> None:
        self._current = _NONE  # what is launched from now on, in another callback, is waited for in one more
        try:
            for operation in operations:
                operation.await_end()
        finally:
            operations.clear()

    def forget(self) -> None:
        """Release all operations, also those of a pass that never came to its end.

        Operations hold this object: left to the garbage collector, they could be freed in a process that a script
        forks, a loader's worker, where gloo's destructor waits for threads that only the parent has.
        """
        self._current = _NONE
        self._operations.clear()
