"""Shapes of Lightning scripts, chosen by name: each as people write it."""

import argparse
import hashlib

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError


def numbers(count, seed):
    return TensorDataset(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)))


class Net(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 8))
        self.error = MeanAbsoluteError()
        self.losses = []

    def training_step(self, batch, batch_idx):
        if self.kind == "loaders":
            batch = [torch.cat([batch["a"][0], batch["b"][0]])]
        found = self.net(batch[0])
        loss = (found - batch[0]).pow(2).mean()
        self.error(found, batch[0])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return {"loss": loss, "found": found.detach()}

    def on_train_epoch_end(self):
        self.log("mean", sum(self.losses) / len(self.losses), sync_dist=True)
        self.losses.clear()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", (self.net(batch[0]) - batch[0]).abs().mean(), sync_dist=True)

    def configure_optimizers(self):
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        if self.kind == "plateau":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100)]


class Sum:
    def __init__(self):
        self.value = 0.0

    def add(self, value):
        self.value += value


class Found:
    def __init__(self, number, mean):
        self.number, self.mean = number, mean
        self.parts = [mean.abs()]


class Appends(L.Callback):
    """Keeps an object for each batch, and changes the one before."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        mean = outputs["found"].mean()
        if self.found:
            self.found[-1].mean += mean
        self.found.append(Found(len(self.found), mean))


class Outputs(L.Callback):
    """Reads what training_step returned."""

    def __init__(self):
        self.total = 0.0
        self.sums = [Sum()]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.total += float(outputs["found"].sum())
        self.sums[0].add(float(outputs["found"].sum()))


parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--output")
parser.add_argument("--strategy", default="relight")
parser.add_argument("--resume")
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()
kind = options.kind
torch.set_num_threads(1)
L.seed_everything(7)
extra = {}
callbacks = [Outputs(), ModelCheckpoint(options.output, every_n_train_steps=3, save_top_k=-1)]
appends = Appends()
if kind == "appends":
    callbacks.append(appends)
if kind == "average":
    callbacks.append(EMAWeightAveraging(decay=0.9))
if kind == "bf16":
    extra = {"precision": "bf16-mixed", "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}
if kind == "limits":
    extra = {
        "limit_train_batches": 5,
        "limit_val_batches": 2,
        "check_val_every_n_epoch": 2,
        "accumulate_grad_batches": 2,
    }
if kind == "steps":
    extra = {"max_steps": 9, "val_check_interval": 5, "check_val_every_n_epoch": None, "max_time": "00:01:00:00"}
if kind == "two":
    callbacks += [ModelCheckpoint(options.output), ModelCheckpoint(options.output, save_last=True, monitor="val")]
extra.setdefault("max_epochs", -1 if kind == "steps" else options.epochs)
trainer = L.Trainer(
    strategy=options.strategy,
    accelerator="cpu",
    devices=2,
    log_every_n_steps=2,
    callbacks=callbacks,
    logger=CSVLogger(options.output, name="log"),
    enable_progress_bar=kind == "bar",
    enable_model_summary=False,
    **extra,
)
model = Net(kind)
loader = DataLoader(numbers(64, 0), batch_size=4, shuffle=True)
if kind == "loaders":
    loader = {"a": loader, "b": DataLoader(numbers(40, 2), batch_size=4, shuffle=True)}
if kind == "workers":
    loader = DataLoader(numbers(64, 0), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
trainer.fit(model, loader, DataLoader(numbers(16, 1), batch_size=4), ckpt_path=options.resume)
weights = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
own = [callbacks[0].total, callbacks[0].sums[0].value]
own += [(each.number, each.mean.item(), each.parts[0].item()) for each in appends.found]
digest = hashlib.sha256(weights + repr(own).encode()).hexdigest()[:16]
print(f"rank {trainer.global_rank}: {trainer.global_step} steps, digest {digest}", flush=True)
