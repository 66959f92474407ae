"""The newest published weights, in host memory, for an engine that takes them when it is asked to.

Engines of several workers need all of them to change at the same point between two forward passes, which only the
engine knows. So each worker collects what is published beside the engine's work, and the engine's own command for an
update makes all of them load one named version.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from relight.errors import TransferError
from relight.transfer.engine.receiver import Receiver

Pairs = Iterable[tuple[str, torch.Tensor]]


class WeightCache:
    """Collects what is published at `place`. Needs host memory for one copy of the weights."""

    def __init__(self, place: str | Path, *, name: str | None = None) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        # In place: what arrives replaces what is held, while the engine's own weights stay as they are.
        self._receiver = Receiver(place, load=self._keep, mode="in-place", name=name)

    def _keep(self, pairs: Pairs) -> None:
        self._tensors.update(pairs)

    @property
    def version(self) -> int:
        """Version of the weights that are held; -1: none yet."""
        return self._receiver.version

    def load_into(
        self, load: Callable[[Pairs], object], *, version: int, device: torch.device, timeout_seconds: float
    ) -> None:
        """Give exactly this version to `load`, as copies on `device` made one by one; what is held stays meanwhile.

        Raises TransferError, before `load` is called, if it did not come within the time, or if a newer one has
        replaced it. The message names the version that can be had.
        """
        if not self._receiver.wait_for(version, timeout_seconds):
            raise TransferError(
                f"version {version} did not come within {timeout_seconds:g} s: "
                f"{self._receiver.stale or f'version {self._receiver.version} is held'}"
            )
        with self._receiver.serving() as held:
            if held != version:
                raise TransferError(f"version {version} has been replaced by version {held} meanwhile; load that one")
            load((name, tensor.to(device, copy=True)) for name, tensor in self._tensors.items())

    def close(self) -> None:
        """Stop collecting, and let go of what is held."""
        self._receiver.close()
        self._tensors.clear()
