"""Another process that works on exported memory of the late device."""

from multiprocessing.connection import Connection

import torch

from tests.device_extension import late


def add_one(connection: Connection) -> None:
    """Add one to each memory whose handle comes, until None comes; send the value before, and the races so far."""
    while (handle := connection.recv()) is not None:
        values = late.native.import_memory(handle, 0).view(torch.float32)
        before = values.clone()
        values.add_(1.0)
        torch.accelerator.synchronize(0)
        connection.send((before[0].item(), late.native.races()))
