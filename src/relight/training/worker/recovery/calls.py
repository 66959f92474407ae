"""Collectives that code between two epochs has called, so that those under way can be called again."""

from collections.abc import Sequence
from typing import Any

import torch

from relight.training.collectives.policy import Cuttable
from relight.training.collectives.shared_results import SharedResult, outputs_of, tensors_in

_MOST_BYTES = 2**26  # of tensors that the collectives under way get
_MOST_RESULT_BYTES = 2**24  # of what the collectives of such code have given so far


class Call:
    """A collective that the code has called."""

    def __init__(self, operation: str, arguments: Sequence[Any], *, is_of_all: bool) -> None:
        """`operation`: empty if this is one of c10d's functions. `is_of_all`: all ranks take part in it."""
        self.operation, self.arguments = operation, arguments
        self.work: Cuttable | None = None  # what the script waits for; None: it is not launched
        self._outputs = outputs_of(operation, arguments) if is_of_all else None
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, nbytes: int) -> bool:
        """Keep copies of what it gets, if there is room for them, so that it can be called again."""
        found = list(tensors_in(self.arguments))
        if sum(tensor.nbytes for tensor in found) > nbytes:
            return False
        self._before = [(tensor, tensor.detach().clone()) for tensor in found]
        return True

    @property
    def nbytes(self) -> int:
        """The size of the copies that are kept."""
        return sum(copy.nbytes for _, copy in self._before)

    def result(self) -> SharedResult | None:
        """Return what it has just given; None: ranks get different results, or it is not known which."""
        if self._outputs is None:
            return None
        return SharedResult(self.operation, [tensor.detach().clone() for tensor in self._outputs])

    def put_back(self) -> None:
        """Give its arguments the values with which it was called."""
        with torch.no_grad():
            for tensor, before in self._before:
                tensor.copy_(before)


class Calls:
    """All calls since the code began: results of those that are over, and then those under way, in their order."""

    def __init__(self) -> None:
        self.number = 0  # of calls so far
        self.results: list[SharedResult] = []
        self.under_way: list[Call] = []
        self.can_repeat = True  # those under way, and a replacement can be given what the others gave

    def add(self, call: Call) -> None:
        """The script has come to a collective."""
        self.number += 1
        if not self.can_repeat:
            return
        if call.keep(_MOST_BYTES - sum(one.nbytes for one in self.under_way)):
            self.under_way.append(call)
        else:
            self.stop()

    def complete(self, work: Cuttable) -> None:
        """A collective is over, and its result has not been changed yet."""
        call = next((one for one in self.under_way if one.work is work), None)
        if call is None:
            return
        result = call.result() if call is self.under_way[0] else None
        if result is None or self._result_bytes + _nbytes(result) > _MOST_RESULT_BYTES:
            self.stop()
        else:
            del self.under_way[0]
            self.results.append(result)

    def stop(self) -> None:
        """Nothing of this code can be repeated from here on."""
        self.can_repeat = False
        self.under_way = []

    @property
    def waits_in(self) -> int:
        """The number of the first collective that is under way; 0: there is none that can be called again."""
        return len(self.results) + 1 if self.under_way else 0

    @property
    def are_known(self) -> bool:
        """True if all are over, and a replacement can be given what each of them gave."""
        return self.can_repeat and len(self.results) == self.number

    @property
    def _result_bytes(self) -> int:
        return sum(_nbytes(result) for result in self.results)


def _nbytes(result: SharedResult) -> int:
    return sum(tensor.nbytes for tensor in result.tensors)
