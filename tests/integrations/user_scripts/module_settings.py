"""A Lightning script made of settings, one of each group: `module_settings.py NAME+NAME+... --output DIRECTORY`.

Each function below is a setting as scripts on the web have it; those of the module are mixins. `GROUPS` says which
exclude one another; the test generates the scripts from it. `--dies HOOK:RANK:STEP` has a rank kill itself once.
"""

import argparse
import copy
import hashlib
import json
import os
import signal
import time
from collections import deque
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

parser = argparse.ArgumentParser()
parser.add_argument("settings")
parser.add_argument("--output")
parser.add_argument("--dies", default="")
parser.add_argument("--strategy", default="relight")
options = parser.parse_args()
torch.set_num_threads(1)
L.seed_everything(7)


def numbers(count=60, seed=0):
    return TensorDataset(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)))


class Base(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return (self(batch[0]) - batch[0]).pow(2).mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", (self(batch[0]) - batch[0]).abs().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Dies(L.Callback):
    """Kills its rank in a hook, once. It keeps nothing: a file beside the output says that it is done."""

    def __init__(self, hook, rank, step):
        self.rank, self.step, self.mark = int(rank), int(step), options.output + ".died"
        setattr(self, hook, self.look)

    def look(self, trainer, *args, **kwargs):
        due = trainer.global_step >= self.step and not trainer.sanity_checking
        if due and trainer.global_rank == self.rank and not Path(self.mark).exists():
            Path(self.mark).parent.mkdir(parents=True, exist_ok=True)
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Kit:
    """Parts that the settings fill in."""

    def __init__(self):
        self.mixins, self.callbacks, self.own = [], [], []
        self.data = DataLoader(numbers(), batch_size=4, shuffle=True)
        self.options = {"max_epochs": 3, "log_every_n_steps": 2}

    def fit(self):
        torch.manual_seed(5)
        model = type("Mine", (*self.mixins, Base), {})()
        trainer = L.Trainer(
            **{
                "strategy": options.strategy, "accelerator": "cpu", "devices": 2,
                "callbacks": [*self.callbacks, *([Dies(*options.dies.split(":"))] if options.dies else [])],
                "logger": CSVLogger(options.output, name="log"), "default_root_dir": options.output,
                "enable_progress_bar": False, "enable_model_summary": False, **self.options,
            }
        )  # fmt: skip
        trainer.fit(model, self.data, DataLoader(numbers(16, 1), batch_size=4))
        report(trainer, model, [own(model) for own in self.own])


def digest(value):
    sha = hashlib.sha256()

    def feed(each):
        if isinstance(each, torch.Tensor):
            sha.update(each.detach().float().contiguous().numpy().tobytes())
        elif isinstance(each, dict):
            for name in sorted(each, key=str):
                sha.update(str(name).encode())
                feed(each[name])
        elif isinstance(each, list | tuple | deque):
            for one in each:
                feed(one)
        else:
            sha.update(repr(each).encode())

    feed(value)
    return sha.hexdigest()[:12]


def report(trainer, model, own):
    words = {
        "steps": trainer.global_step,
        "weights": digest(model.state_dict()),
        "optimizers": digest([o.state_dict()["state"] for o in trainer.optimizers]),
        "rates": [group["lr"] for o in trainer.optimizers for group in o.param_groups],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "own": digest(own),
    }
    print(f"rank {trainer.global_rank}: {json.dumps(words)}\n", end="", flush=True)
    if trainer.global_rank == 0:
        paths = sorted(path for path in Path(options.output).rglob("*") if path.is_file())
        weights = {
            path.name: digest(torch.load(path, weights_only=False)["state_dict"])
            for path in paths
            if path.suffix == ".ckpt"
        }
        log = Path(options.output, "log", "version_0", "metrics.csv")
        names = [str(path.relative_to(options.output)) for path in paths]
        print(f"files: {json.dumps([names, weights, digest(log.read_text())])}\n", end="", flush=True)


# --- data ---------------------------------------------------------------------------------------------------------
def workers(kit):
    kit.data = DataLoader(numbers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)


def weighted(kit):
    kit.data = DataLoader(numbers(), batch_size=4, sampler=WeightedRandomSampler(torch.arange(1.0, 61.0), 32))
    kit.options["use_distributed_sampler"] = False


def staged(kit):
    """A dataset whose stage a callback moves on after each batch."""

    class Staged(Dataset):
        def __init__(self):
            self.rows, self.stage = numbers().tensors[0], 0

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, index):
            row = self.rows[index].clone()
            row[: self.stage % 4] = 0
            return (row,)

    data = Staged()

    class Callback(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            data.stage += 1

    kit.data = DataLoader(data, batch_size=4, shuffle=True)
    kit.callbacks.append(Callback())


def two_loaders(kit):
    class Mine(Base):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])
            self.log("loss", loss)
            return loss

    loaders = {
        "a": DataLoader(numbers(), batch_size=4, shuffle=True), "b": DataLoader(numbers(60, 2), batch_size=4),
    }  # fmt: skip
    kit.mixins.append(Mine)
    kit.data = L.pytorch.utilities.CombinedLoader(loaders, "max_size_cycle")


# --- optimization -------------------------------------------------------------------------------------------------
def accumulates(kit):
    """Three batches a step, and a remainder; gradients clipped by value."""
    kit.options |= {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}


def two_by_hand(kit):
    """Manual optimization with two optimizers that are toggled, and a scheduler each."""

    class Mine(Base):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.judge = nn.Linear(8, 1)
            self.turns = [0, 0]

        def training_step(self, batch, batch_idx):
            one, two = self.optimizers()
            self.toggle_optimizer(one)
            loss = self.loss(batch) + 0.01 * self.judge(self(batch[0])).mean()
            self.manual_backward(loss)
            self.clip_gradients(one, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            one.step()
            one.zero_grad()
            self.untoggle_optimizer(one)
            self.turns[0] += 1
            if batch_idx % 2 == 0:
                self.toggle_optimizer(two)
                judged = self.judge(batch[0]).pow(2).mean() - self.judge(self(batch[0]).detach()).mean()
                self.manual_backward(judged)
                two.step()
                two.zero_grad()
                self.untoggle_optimizer(two)
                self.turns[1] += 1
            for scheduler in self.lr_schedulers():
                scheduler.step()
            self.log_dict({"loss": loss, "turns": float(self.turns[1])})

        def configure_optimizers(self):
            optimizers = [
                torch.optim.AdamW(self.net.parameters(), lr=1e-2), torch.optim.SGD(self.judge.parameters(), lr=1e-2),
            ]  # fmt: skip
            return optimizers, [torch.optim.lr_scheduler.StepLR(each, 4, 0.5) for each in optimizers]

    kit.mixins.append(Mine)
    kit.own.append(lambda model: model.turns)
    kit.options["strategy"] = options.strategy + "_find_unused_parameters_true"


def cosine(kit):
    class Mine(Base):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            total = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - 3),
                ],
                [3],
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}

    kit.mixins.append(Mine)


def own_step(kit):
    """optimizer_step with a warm-up by hand, weights that are clamped after it, a loss that is weighed by a mean."""

    class Mine(Base):
        def __init__(self):
            super().__init__()
            self.mean, self.window = 1.0, deque(maxlen=4)

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch) / self.mean
            self.window.append(float(loss.detach()))
            self.mean = 0.9 * self.mean + 0.1 * sum(self.window) / len(self.window)
            self.log("mean", self.mean)
            return {"loss": loss, "mean": torch.tensor(self.mean)}

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (self.trainer.global_step + 1) / 6)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            with torch.no_grad():
                for p in self.parameters():
                    p.clamp_(-1, 1)

    kit.mixins.append(Mine)
    kit.own.append(lambda model: [model.mean, model.window])


# --- precision ----------------------------------------------------------------------------------------------------
def bf16(kit):
    kit.options["precision"] = "bf16-mixed"


def bf16_true(kit):
    kit.options["precision"] = "bf16-true"


def compiled(kit):
    class Mine(Base):
        def __init__(self):
            super().__init__()
            self.net.compile(backend="aot_eager")

    kit.mixins.append(Mine)


def synchronized(kit):
    kit.options["sync_batchnorm"] = False
    kit.options |= {"detect_anomaly": True, "benchmark": False, "deterministic": True}


# --- callbacks ----------------------------------------------------------------------------------------------------
def copied_at_start(kit):
    """A callback that copies the model in on_fit_start, averages, and swaps the average in for validation."""

    class Callback(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.ema = copy.deepcopy(pl_module.net)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), pl_module.net.parameters(), strict=True):
                    e.lerp_(p, 0.1)

        def on_validation_start(self, trainer, pl_module):
            self.kept = {name: value.clone() for name, value in pl_module.net.state_dict().items()}
            pl_module.net.load_state_dict(self.ema.state_dict())

        def on_validation_end(self, trainer, pl_module):
            pl_module.net.load_state_dict(self.kept)
            self.kept = None

    callback = Callback()
    kit.callbacks.append(callback)
    kit.own.append(lambda model: callback.ema.state_dict())


def lazy_copy(kit):
    """A callback that copies the model in the first on_train_batch_end, and averages: refused."""

    class Callback(L.Callback):
        def __init__(self):
            self.ema = None

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if self.ema is None:
                self.ema = copy.deepcopy(pl_module.net)
                return
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), pl_module.net.parameters(), strict=True):
                    e.lerp_(p, 0.1)

    callback = Callback()
    kit.callbacks.append(callback)
    kit.own.append(lambda model: callback.ema.state_dict())


def counted_copy(kit):
    """A late copy in a callback whose state_dict says nothing of it: refused, too."""
    lazy_copy(kit)
    kind = type(kit.callbacks[-1])
    kind.state_dict = lambda self: {"is_made": self.ema is not None}


def best_copy(kit):
    """A callback that copies the model after each validation: told, and not vouched for after a failure."""

    class Callback(L.Callback):
        def __init__(self):
            self.best = None

        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.best = copy.deepcopy(pl_module.net)

    callback = Callback()
    kit.callbacks.append(callback)
    kit.own.append(lambda model: callback.best.state_dict())


def lazy_shadow(kit):
    class Callback(L.Callback):
        def __init__(self):
            self.shadow = {}

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for name, p in pl_module.named_parameters():
                old = self.shadow.setdefault(name, p.detach().clone())
                self.shadow[name] = 0.9 * old + 0.1 * p.detach()

    callback = Callback()
    kit.callbacks.append(callback)
    kit.own.append(lambda model: callback.shadow)


def averaging(kit):
    kit.callbacks.append(WeightAveraging(avg_fn=lambda a, p, n: 0.8 * a + 0.2 * p))


def ema_averaging(kit):
    kit.callbacks.append(EMAWeightAveraging(decay=0.8, update_every_n_steps=2, update_starting_at_step=4))


def counting(kit):
    """A callback that counts images, and watches gradients; its state_dict says only some of what it holds."""

    class Callback(L.Callback):
        def __init__(self):
            self.seen, self.norms, self.last = 0, [], {"norm": 0.0}
            self.window, self.rounded, self.generator = deque(maxlen=3), set(), torch.Generator().manual_seed(3)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.seen += 1

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norm = float(torch.stack([p.grad.norm() for p in pl_module.parameters() if p.grad is not None]).norm())
            self.norms.append(norm)
            self.last["norm"] = norm
            self.window.append(norm)
            self.rounded.add(round(norm, 1))
            noise = 1 + 0.01 * torch.rand(1, generator=self.generator) * len(self.rounded) * sum(self.window)
            for p in pl_module.net.parameters():
                if p.grad is not None:
                    p.grad.mul_(noise)
            pl_module.log("norm", norm)

        def state_dict(self):
            return {"seen": self.seen, "norms": list(self.norms), "last": dict(self.last)}

        def load_state_dict(self, state):
            self.seen, self.norms, self.last = state["seen"], list(state["norms"]), dict(state["last"])

    callback = Callback()
    kit.callbacks += [callback, LearningRateMonitor("step")]
    kit.own.append(lambda model: [callback.seen, callback.norms, callback.last, callback.window])
    kit.own.append(lambda model: [sorted(callback.rounded), callback.generator.get_state()])


def timer(kit):
    """Lightning's Timer, and a callback that measures, as many do."""

    class Callback(L.Callback):
        def __init__(self):
            self.began, self.batch_began, self.seconds, self.batches = time.time(), None, [], 0

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.batch_began = time.perf_counter()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.seconds.append(time.perf_counter() - self.batch_began)
            self.batches += 1

    callback = Callback()
    kit.callbacks += [callback, Timer(duration={"hours": 2})]
    kit.own.append(lambda model: [callback.batches, len(callback.seconds)])


# --- checkpoints --------------------------------------------------------------------------------------------------
def best_two(kit):
    kit.callbacks += [
        ModelCheckpoint(options.output, monitor="val", save_top_k=2, save_last=True, filename="{epoch}-{val:.4f}"),
        EarlyStopping("val", patience=2),
    ]
    kit.options["val_check_interval"] = 4


def every_steps(kit):
    kit.callbacks.append(ModelCheckpoint(options.output, every_n_train_steps=3, save_top_k=-1, filename="{step}"))
    kit.options |= {"max_steps": 14, "max_epochs": -1, "check_val_every_n_epoch": None, "val_check_interval": 5}


def of_epochs(kit):
    kit.callbacks.append(ModelCheckpoint(options.output, every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=1))
    kit.options |= {"num_sanity_val_steps": 0, "limit_val_batches": 2, "check_val_every_n_epoch": 2}


GROUPS = {
    "data": (None, workers, weighted, staged, None, two_loaders),
    "optimization": (accumulates, two_by_hand, own_step, None, cosine, accumulates),
    "precision": (bf16, None, compiled, synchronized, None, bf16_true),
    "callback": (lazy_shadow, counting, copied_at_start, averaging, ema_averaging, timer),
    "checkpoints": (best_two, every_steps, of_epochs, best_two, None, every_steps),
}

if __name__ == "__main__":
    kit = Kit()
    for word in options.settings.split("+"):
        globals()[word](kit)
    kit.fit()
