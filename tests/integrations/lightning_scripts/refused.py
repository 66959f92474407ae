"""A small script with options that are refused under relight."""

import argparse

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset

import relight


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(32)


parser = argparse.ArgumentParser()
parser.add_argument("--output")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--fits", type=int, default=1)
parser.add_argument("--init", type=int, default=0)
parser.add_argument("--data", default="list")
options = parser.parse_args()
torch.set_num_threads(1)
if options.init:
    relight.init()
trainer = L.Trainer(
    strategy="relight",
    accelerator="cpu",
    devices=options.devices,
    max_epochs=1,
    default_root_dir=options.output,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    limit_val_batches=0,
)
data = Endless() if options.data == "iterable" else [torch.ones(32)] * 16
for _ in range(options.fits):
    trainer.fit(BoringModel(), DataLoader(data, batch_size=2))
