"""Scripts with Lightning's Trainer in shapes that people publish, chosen by name."""

import argparse
import copy
import hashlib
import json
from collections import Counter, defaultdict, deque
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--output")
parser.add_argument("--strategy", default="relight")
options = parser.parse_args()
kind = options.kind
torch.set_num_threads(1)
L.seed_everything(7)


def numbers(count=64, seed=0):
    return TensorDataset(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)))


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 8))


class Base(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = (self(batch[0]) - batch[0]).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log(
            "val",
            (self(batch[0]) - batch[0]).abs().mean(),
            sync_dist=True,
            add_dataloader_idx=False if dataloader_idx == 0 else True,
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(model, data=None, validation=None, callbacks=(), own=list, **more):
    trainer = L.Trainer(
        **{
            "strategy": options.strategy,
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 3,
            "log_every_n_steps": 2,
            "callbacks": list(callbacks),
            "logger": CSVLogger(options.output, name="log"),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": options.output,
            **more,
        }
    )
    if isinstance(data, L.LightningDataModule):
        trainer.fit(model, datamodule=data)
    else:
        loader = data or DataLoader(numbers(), batch_size=4, shuffle=True)
        trainer.fit(model, loader, validation or DataLoader(numbers(16, 1), batch_size=4))
    state = b"".join(value.detach().float().numpy().tobytes() for value in model.state_dict().values())
    optimizer = [
        v
        for o in trainer.optimizers
        for s in o.state_dict()["state"].values()
        for v in s.values()
        if isinstance(v, torch.Tensor)
    ]
    words = {
        "steps": trainer.global_step,
        "weights": hashlib.sha256(state).hexdigest()[:12],
        "optimizer": hashlib.sha256(b"".join(v.float().numpy().tobytes() for v in optimizer)).hexdigest()[:12],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "own": own(),
    }
    print(f"rank {trainer.global_rank}: {json.dumps(words)}\n", end="", flush=True)
    if trainer.global_rank == 0:
        log = Path(options.output, "log", "version_0", "metrics.csv")
        files = sorted(
            str(path.relative_to(options.output)) for path in Path(options.output).rglob("*") if path.is_file()
        )
        text = log.read_text() if log.exists() else ""
        print(f"files: {json.dumps([files, hashlib.sha256(text.encode()).hexdigest()[:12]])}\n", end="", flush=True)


def byol():
    """A target network that follows the online one, in on_before_zero_grad, and one in on_train_batch_end."""

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.target = copy.deepcopy(self.net).requires_grad_(False)
            self.slow = copy.deepcopy(self.net).requires_grad_(False)
            self.decay = 0.5

        def training_step(self, batch, batch_idx):
            loss = (self.net(batch[0]) - self.target(batch[0]).detach()).pow(2).mean() + (
                self.net(batch[0]) - batch[0]
            ).pow(2).mean()
            self.log_dict({"loss": loss, "decay": self.decay}, sync_dist=True)
            return loss

        def follow(self, module, decay):
            with torch.no_grad():
                for t, p in zip(module.parameters(), self.net.parameters(), strict=True):
                    t.mul_(decay).add_(p, alpha=1 - decay)

        def on_before_zero_grad(self, optimizer):
            self.follow(self.target, self.decay)
            self.decay = 1 - (1 - self.decay) * 0.99

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.follow(self.slow, 0.9)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    model = Module()
    fit(model, own=lambda: [model.decay])


def late_teacher():
    """A teacher that a hook makes when a later epoch begins."""

    class Module(Base):
        teacher = None

        def on_train_epoch_start(self):
            if self.current_epoch == 2:
                self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    fit(Module())


def containers():
    """Attributes of a module in many kinds of containers."""

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.window, self.counts, self.sums = deque(maxlen=5), Counter(), defaultdict(list)
            self.table, self.rng, self.seen = np.zeros(4), np.random.default_rng(3), set()
            self.memory, self.outputs = [], []
            self.best = float("inf")

        def training_step(self, batch, batch_idx):
            x = batch[0] + 0.01 * float(self.rng.standard_normal())
            if self.memory:
                x = torch.cat([x, self.memory[-1]])
            self.memory = [*self.memory[-3:], batch[0].detach().clone()]
            loss = (self(x) - x).pow(2).mean()
            value = float(loss)
            self.window.append(value)
            self.counts["steps"] += 1
            self.sums["loss"].append(value)
            self.table += [value, 1, value * value, 0]
            self.seen.add(batch_idx)
            self.best = min(self.best, value)
            self.log("window", sum(self.window) / len(self.window))
            self.outputs.append(loss.detach())
            return loss

        def on_train_epoch_end(self):
            self.log("epoch_mean", torch.stack(self.outputs).mean(), sync_dist=True)
            self.outputs.clear()

    model = Module()
    fit(
        model,
        own=lambda: [
            list(model.window),
            dict(model.counts),
            sum(model.sums["loss"]),
            model.table.tolist(),
            len(model.seen),
            model.best,
        ],
    )


def finetuning():
    """A backbone that is frozen, and joins the optimizer later."""

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.backbone, self.net = net(), nn.Linear(8, 8)

        def forward(self, x):
            return self.net(self.backbone(x))

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    class Callback(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module, current_epoch, optimizer):
            if current_epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)

    fit(Module(), callbacks=[Callback()], strategy=options.strategy + "_find_unused_parameters_true")


def backbone():
    class Module(Base):
        def __init__(self):
            super().__init__()
            self.backbone, self.net = net(), nn.Linear(8, 8)

        def forward(self, x):
            return self.net(self.backbone(x))

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]

    fit(
        Module(),
        callbacks=[BackboneFinetuning(1, lambda epoch: 2, verbose=False)],
        strategy=options.strategy + "_find_unused_parameters_true",
    )


def swa():
    fit(Base(), callbacks=[StochasticWeightAveraging(swa_lrs=1e-2)])


def curriculum():
    """A dataset whose epoch is set, by a hook and by a data module."""

    class Staged(Dataset):
        def __init__(self):
            self.rows, self.stage = numbers().tensors[0], 0

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            row = self.rows[index].clone()
            row[: 6 - 2 * self.stage] = 0
            return (row,)

    data = Staged()

    class Module(Base):
        def on_train_epoch_start(self):
            data.stage = self.current_epoch

    fit(Module(), DataLoader(data, batch_size=4, shuffle=True), accumulate_grad_batches=2)


def validations():
    """Several validation loaders, collections of metrics, a checkpoint by one of them, early stopping, a plateau."""

    class Module(Base):
        def __init__(self):
            super().__init__()
            metrics = MetricCollection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError()})
            self.train_metrics, self.val_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")
            self.mean = MeanMetric()
            self.kept = []

        def training_step(self, batch, batch_idx):
            out = self(batch[0])
            loss = (out - batch[0]).pow(2).mean()
            self.mean.update(loss.detach())
            self.log_dict(self.train_metrics(out.detach(), batch[0]), on_step=True, on_epoch=False)
            return {"loss": loss, "size": len(out)}

        def on_train_epoch_end(self):
            self.log("mean", self.mean.compute())
            self.mean.reset()

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            out = self(batch[0])
            self.val_metrics.update(out, batch[0])
            self.kept.append(out)
            self.log("spread", out.std(), sync_dist=True)

        def on_validation_epoch_end(self):
            self.log_dict(self.val_metrics.compute(), prog_bar=True)
            self.val_metrics.reset()
            everything = self.all_gather(torch.cat(self.kept))
            self.log("total", everything.sum(), sync_dist=True)
            self.kept.clear()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_mae", "interval": "epoch"},
            }

    fit(
        Module(),
        None,
        [DataLoader(numbers(16, 1), batch_size=4), DataLoader(numbers(12, 2), batch_size=4)],
        callbacks=[
            ModelCheckpoint(options.output, monitor="val_mae", filename="{epoch}-{val_mae:.3f}"),
            EarlyStopping("val_mse", patience=1),
            LearningRateMonitor(),
        ],
        val_check_interval=0.5,
        gradient_clip_val=0.5,
        num_sanity_val_steps=2,
    )


def samplers():
    """Batches by length from a batch sampler of the script's own; a weighted sampler for validation."""

    class Buckets(Sampler):
        def __init__(self, size):
            self.size, self.epoch = size, 0
            self.generator = torch.Generator().manual_seed(11)

        def __iter__(self):
            order = torch.randperm(self.size, generator=self.generator).tolist()
            return iter(order)

        def __len__(self):
            return self.size

    fit(
        Base(),
        DataLoader(numbers(), batch_size=4, sampler=Buckets(64)),
        use_distributed_sampler=True,
        callbacks=[TQDMProgressBar()],
        enable_progress_bar=True,
    )


def weighted():
    weights = torch.arange(1.0, 65.0)
    fit(
        Base(),
        DataLoader(numbers(), batch_size=4, sampler=WeightedRandomSampler(weights, 64)),
        use_distributed_sampler=False,
    )


def batch_sampler():
    fit(
        Base(),
        DataLoader(numbers(), batch_sampler=BatchSampler(torch.utils.data.RandomSampler(range(64)), 4, drop_last=True)),
    )


def manual():
    """Manual optimization with accumulation and warm-up by hand, in one optimizer, as in diffusion scripts."""
    _accumulate_by_hand(net)


def manual_pair():
    """Two optimizers by hand, of which the second pauses in every other batch, while its gradients wait."""

    class Pair(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            slow, fast = self.optimizers()
            real = batch[0]
            self.toggle_optimizer(fast)
            loss = nn.functional.softplus(-self.critic(self.generator(real))).mean()
            fast.zero_grad()
            self.manual_backward(loss)
            fast.step()
            self.untoggle_optimizer(fast)
            self.toggle_optimizer(slow)
            fake = self.generator(real).detach()
            critic_loss = nn.functional.softplus(self.critic(fake) - self.critic(real)).mean()
            self.manual_backward(critic_loss)
            if (batch_idx + 1) % 2 == 0:
                slow.step()
                slow.zero_grad()
            self.untoggle_optimizer(slow)
            self.log_dict({"generator": loss, "critic": critic_loss})

        def configure_optimizers(self):
            fast = torch.optim.Adam(self.generator.parameters(), 1e-2)
            return torch.optim.SGD(self.critic.parameters(), 1e-1), fast

    fit(Pair(), strategy="relight_find_unused_parameters_true")


def tracker():
    """torchmetrics' MetricTracker copies its metric in each epoch: a layer that a step makes."""
    import torchmetrics

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.tracker = torchmetrics.wrappers.MetricTracker(torchmetrics.MeanMetric(), maximize=False)

        def on_train_epoch_start(self):
            self.tracker.increment()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.tracker.update(outputs["loss"])

    fit(Module())


def manual_large():
    """Manual optimization that accumulates 34 MiB of gradients."""
    _accumulate_by_hand(lambda: nn.Sequential(nn.Linear(8, 2**19), nn.Linear(2**19, 8)))


def _accumulate_by_hand(make_net):
    class Module(Base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = make_net()
            self.updates = 0

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = (self(batch[0]) - batch[0]).pow(2).mean()
            self.manual_backward(loss / 2)
            if (batch_idx + 1) % 2 == 0:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 * min(1.0, (self.updates + 1) / 5)
                self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                self.updates += 1
            self.log("loss", loss, on_step=True, on_epoch=True)

    model = Module()
    fit(model, own=lambda: [model.updates])


def hooks():
    """Noise on gradients, a loss scale that adapts, lambda callbacks with closures, workers of the loader."""
    counts = {"batches": 0, "epochs": 0}
    history = []

    class Data(L.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.epochs_given = 0

        def prepare_data(self):
            numbers()

        def setup(self, stage=None):
            self.train_set, self.val_set = torch.utils.data.random_split(
                numbers(80), [64, 16], torch.Generator().manual_seed(5)
            )

        def train_dataloader(self):
            self.epochs_given += 1
            return DataLoader(self.train_set, batch_size=4, shuffle=True, num_workers=1, drop_last=True)

        def val_dataloader(self):
            return DataLoader(self.val_set, batch_size=4)

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def on_after_backward(self):
            for p in self.parameters():
                p.grad.add_(torch.randn_like(p), alpha=1e-3)

        def on_before_optimizer_step(self, optimizer):
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            self.scale = 0.9 * self.scale + 0.1 * float(norm)
            self.log("scale", self.scale)

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + self.trainer.global_step / 10)

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

    def counted(trainer, module, *rest):
        counts["batches"] += 1
        history.append(float(module.net[0].weight.sum()))

    def epochs(trainer, module):
        counts["epochs"] += 1

    model = Module()
    fit(
        model,
        Data(),
        callbacks=[LambdaCallback(on_train_batch_end=counted, on_train_epoch_end=epochs)],
        own=lambda: [counts, history[-1], len(history), model.scale],
    )


def teacher():
    """A callback that holds an averaged module and swaps it in for validation."""

    class Callback(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.ema = copy.deepcopy(pl_module.net)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), pl_module.net.parameters(), strict=True):
                    e.lerp_(p, 0.1)

        def on_validation_epoch_start(self, trainer, pl_module):
            self.own, pl_module.net = pl_module.net, self.ema

        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.net = self.own

    callback = Callback()
    fit(Base(), callbacks=[callback], own=lambda: [float(sum(p.sum() for p in callback.ema.parameters()))])


if __name__ == "__main__":
    globals()[kind]()
