"""A job of Lightning that prints how long its steps take: wall time, and time of the process's CPU."""

import argparse
import time
from array import array
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIRST = 20  # step from which time is taken: before it relight learns, and caches are filled


class Mlp(L.LightningModule):
    """Some layers of one width."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Compute the loss of a batch, and log it."""
        loss = (self.net(batch[0]) - batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Takes the time of each step from FIRST on."""

    def __init__(self) -> None:
        self.begun = (0.0, 0.0)
        self.walls = array("d")  # no list, which relight would carry

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Begin with step FIRST, and note when each one begins."""
        now = time.monotonic()
        if trainer.global_step == FIRST:
            self.begun = (now, time.process_time())
        if trainer.global_step >= FIRST:
            self.walls.append(now)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Print the medians and means."""
        steps = sorted(after - before for before, after in zip(self.walls, self.walls[1:], strict=False))
        cpu = (time.process_time() - self.begun[1]) / (len(steps) + 1)
        if trainer.is_global_zero:
            print(f"median {1e3 * steps[len(steps) // 2]:.3f} ms, cpu {1e3 * cpu:.3f} ms", flush=True)


def main() -> None:
    """Train for as many steps as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="relight")
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1)
    data = TensorDataset(torch.randn(4096, options.width, generator=torch.Generator().manual_seed(0)))
    trainer = L.Trainer(
        strategy=options.strategy, accelerator="cpu", devices=2, max_steps=options.steps, callbacks=[Clock()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Mlp(options.width, options.layers), DataLoader(data, batch_size=options.batch, shuffle=True))


if __name__ == "__main__":
    main()
