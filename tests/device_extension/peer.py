"""Another process that works on exported memory of the late device."""

from multiprocessing.connection import Connection
from pathlib import Path

import torch

import relight
from tests.device_extension import late


def add_one(connection: Connection) -> None:
    """Add one to each memory whose handle comes, until None comes; send the value before, and the races so far."""
    while (handle := connection.recv()) is not None:
        values = late.native.import_memory(handle, 0).view(torch.float32)
        before = values.clone()
        values.add_(1.0)
        torch.accelerator.synchronize(0)
        connection.send((before[0].item(), late.native.races()))


def serve(connection: Connection, place: Path, shapes: dict[str, tuple[int, ...]], device: int) -> None:
    """Be an engine on a device. For each version that comes, send the values that it answers with, and the races."""
    live = {name: torch.zeros(shape, device=f"late:{device}") for name, shape in shapes.items()}
    notices: list[str] = []
    with relight.Receiver(place, model=live, on_notice=notices.append) as receiver:
        while (version := connection.recv()) is not None:
            arrived = receiver.wait_for(version, 60.0)
            with receiver.serving():
                held = {name: tensor.cpu() for name, tensor in live.items()}
            connection.send((arrived, held, late.native.races(), notices))
