"""A GAN with manual optimization, as people write it: two optimizers, a data module, torchmetrics, an EMA callback."""

import argparse
import hashlib

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy


class Numbers(L.LightningDataModule):
    def setup(self, stage):
        self.train_set = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
        self.val_set = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=4)

    def test_dataloader(self):
        return DataLoader(self.val_set, batch_size=4)


class Ema(L.Callback):
    """Keeps an average of the generator's weights, and uses it in validation."""

    def __init__(self, decay=0.9):
        self.decay = decay
        self.shadow = {}
        self.seen = 0.0

    def on_train_start(self, trainer, pl_module):
        self.shadow = {name: p.detach().clone() for name, p in pl_module.generator.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += float(batch[0].sum()) + float(outputs["loss"])
        for name, p in pl_module.generator.named_parameters():
            self.shadow[name].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    def on_validation_start(self, trainer, pl_module):
        if trainer.sanity_checking or not self.shadow:
            return
        self.backup = {name: p.detach().clone() for name, p in pl_module.generator.named_parameters()}
        with torch.no_grad():
            for name, p in pl_module.generator.named_parameters():
                p.copy_(self.shadow[name])

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking or not self.shadow:
            return
        with torch.no_grad():
            for name, p in pl_module.generator.named_parameters():
                p.copy_(self.backup[name])

    def state_dict(self):
        return {"shadow": self.shadow, "seen": self.seen}

    def load_state_dict(self, state):
        self.shadow, self.seen = state["shadow"], state["seen"]


class Gan(L.LightningModule):
    def __init__(self, log_last):
        super().__init__()
        self.automatic_optimization = False
        self.log_last = log_last
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.d_mean = MeanMetric()
        self.accuracy = BinaryAccuracy()
        self.val_outputs = []

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(real.shape[0], 4)
        ones, zeros = torch.ones(real.shape[0], 1), torch.zeros(real.shape[0], 1)
        bce = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(opt_g)
        g_loss = bce(self.discriminator(self.generator(z)), ones)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        d_loss = (bce(self.discriminator(real), ones) + bce(self.discriminator(self.generator(z).detach()), zeros)) / 2
        self.d_mean(d_loss.detach())
        if not self.log_last:
            self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
            self.log("d_mean", self.d_mean, on_step=False, on_epoch=True)
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        if self.log_last:
            self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
            self.log("d_mean", self.d_mean, on_step=False, on_epoch=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return {"loss": d_loss}

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        logits = self.discriminator(real)
        self.accuracy(torch.sigmoid(logits), torch.ones_like(logits).long())
        self.log("val_acc", self.accuracy, on_epoch=True)
        self.log("val_logit", logits.mean(), sync_dist=True)
        self.val_outputs.append(logits.mean())

    def on_validation_epoch_end(self):
        self.log("val_spread", torch.stack(self.val_outputs).std(), sync_dist=True)
        self.val_outputs.clear()

    def test_step(self, batch, batch_idx):
        self.log("test_logit", self.discriminator(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        return [g, d], [torch.optim.lr_scheduler.ExponentialLR(g, 0.95), torch.optim.lr_scheduler.StepLR(d, 3)]


parser = argparse.ArgumentParser()
parser.add_argument("--output")
parser.add_argument("--strategy", default="relight")
parser.add_argument("--log-last", action="store_true")
options = parser.parse_args()
torch.set_num_threads(1)
L.seed_everything(3)
name = "_find_unused_parameters_true"
ema = Ema()
trainer = L.Trainer(
    strategy=options.strategy + name,
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    log_every_n_steps=1,
    val_check_interval=4,
    logger=[CSVLogger(options.output, name="log"), TensorBoardLogger(options.output, name="tb")],
    callbacks=[ema],
    default_root_dir=options.output,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model, data = Gan(options.log_last), Numbers()
trainer.fit(model, datamodule=data)
found = trainer.validate(model, datamodule=data, verbose=False), trainer.test(model, datamodule=data, verbose=False)
values = [*model.state_dict().values(), *ema.shadow.values()]
weights = b"".join(value.detach().numpy().tobytes() for value in values)
digest = hashlib.sha256(weights + repr(ema.seen).encode()).hexdigest()[:16]
print(f"rank {trainer.global_rank}: {trainer.global_step} steps, digest {digest} {found}", flush=True)
