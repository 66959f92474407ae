"""Encodes a position page, as a worker would have stamped it."""

import struct

from relight.core.protocol.position import WORD, Position


def encode_page(position: Position) -> bytes:
    """The page's words for `position`."""
    values = {
        "private_version_0": position.private_versions[0],
        "private_version_1": position.private_versions[1],
        **dict(zip(("forward_work_ns", "backward_work_ns", "optimizer_work_ns"), position.work_ns, strict=True)),
    }
    words = (values[name] if name in values else getattr(position, name) for name in WORD)
    return b"".join(struct.pack("<d" if isinstance(word, float) else "<q", word) for word in words)
