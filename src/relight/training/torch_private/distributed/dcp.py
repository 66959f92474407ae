"""torch.distributed.checkpoint: where a tensor lies among the files."""

from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo


def storage_info(file: str, offset: int, length: int) -> Any:
    """Return the note of DCP's metadata for `length` bytes at `offset` of a file of the checkpoint."""
    return _StorageInfo(file, offset, length)
