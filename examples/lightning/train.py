"""A Lightning `Trainer` that survives failures: `relight run --nproc-per-node 2 --standby 1 train.py`.

One word differs from a script without relight: the name of the strategy. The model is a small network, the data random
numbers, so nothing is downloaded.
"""

import argparse
import hashlib

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(L.LightningModule):
    """Learns to repeat its input through a narrow layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Dropout(dropout), nn.GELU(), nn.Linear(64, 32))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Compute the loss of a batch."""
        loss = (self.net(batch[0]) - batch[0]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Log the loss of a batch."""
        self.log("val_loss", (self.net(batch[0]) - batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return AdamW with a cosine schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def numbers(count: int, seed: int) -> TensorDataset:
    """Make `count` vectors of 32 random numbers."""
    return TensorDataset(torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)))


def main() -> None:
    """Train, and print a digest of the weights on each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/lightning", help="where Lightning writes logs and checkpoints")
    parser.add_argument("--strategy", default="relight")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--resume", help="a checkpoint of Lightning's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=0.5,
        log_every_n_steps=1,
        logger=CSVLogger(options.output, name="log"),
        callbacks=[
            ModelCheckpoint(options.output, monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping("val_loss", patience=10),
            LearningRateMonitor("step"),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Denoiser(options.dropout)
    train, validation = DataLoader(numbers(92, 0), batch_size=4, shuffle=True), DataLoader(numbers(16, 1), batch_size=4)
    trainer.fit(model, train, validation, ckpt_path=options.resume)
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
