"""A Brain class with stages as an enumeration, hparams by attribute, a schedule that anneals on stalls, several optimizers."""

# ranks: 2
from enum import Enum, auto
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Stage(Enum):
    TRAIN = auto()
    VALID = auto()


class NewBobScheduler:
    def __init__(self, initial_value, annealing_factor=0.5, improvement_threshold=0.0025, patient=0):
        self.hyperparam_value, self.annealing_factor = initial_value, annealing_factor
        self.improvement_threshold, self.patient, self.metric_values, self.current_patient = (
            improvement_threshold,
            patient,
            [],
            patient,
        )

    def __call__(self, metric_value):
        old_value = new_value = self.hyperparam_value
        if len(self.metric_values) > 0:
            prev = self.metric_values[-1]
            improvement = 0 if prev == 0 else (prev - metric_value) / prev
            if improvement < self.improvement_threshold:
                if self.current_patient == 0:
                    new_value *= self.annealing_factor
                    self.current_patient = self.patient
                else:
                    self.current_patient -= 1
        self.metric_values.append(metric_value)
        self.hyperparam_value = new_value
        return old_value, new_value


class InputNormalization(nn.Module):
    """Global statistics in plain attributes and a dict, frozen after some updates."""

    def __init__(self, update_until=6):
        super().__init__()
        self.glob_mean, self.glob_std, self.weight, self.count = torch.tensor([0.0]), torch.tensor([1.0]), 1.0, 0
        self.spk_dict_mean, self.spk_dict_count, self.update_until = {}, {}, update_until

    def forward(self, x, spk_ids):
        if self.training and self.count < self.update_until:
            mean, std = x.mean(0).detach(), x.std(0).detach()
            if self.count == 0:
                self.glob_mean, self.glob_std = mean, std
            else:
                self.weight = 1 / (self.count + 1)
                self.glob_mean = (1 - self.weight) * self.glob_mean + self.weight * mean
                self.glob_std = (1 - self.weight) * self.glob_std + self.weight * std
            self.count += 1
        for spk, row in zip(spk_ids.tolist(), x.detach()):
            if spk not in self.spk_dict_mean:
                self.spk_dict_mean[spk], self.spk_dict_count[spk] = row.mean(), 1
            else:
                self.spk_dict_count[spk] += 1
                self.spk_dict_mean[spk] += (row.mean() - self.spk_dict_mean[spk]) / self.spk_dict_count[spk]
        shift = torch.stack([self.spk_dict_mean[s] for s in spk_ids.tolist()])
        return (x - self.glob_mean.data) / (self.glob_std.data + 0.1) - shift[:, None]


class Brain:
    def __init__(self, modules, opt_class, hparams):
        self.modules = nn.ModuleDict(modules)
        self.opt_class, self.hparams = opt_class, SimpleNamespace(**hparams)
        self.step = self.optimizer_step = 0
        self.avg_train_loss, self.nonfinite_count, self.valid_step = 0.0, 0, 0
        self.init_optimizers()

    def init_optimizers(self):
        self.optimizer = self.opt_class(self.modules.parameters())
        self.optimizers_dict = {"opt_class": self.optimizer}

    def update_average(self, loss, avg_loss):
        if torch.isfinite(loss):
            avg_loss -= avg_loss / self.step
            avg_loss += float(loss) / self.step
        return avg_loss

    def freeze_optimizers(self, optimizers):
        return optimizers

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        loss.backward()
        self.optimizers_step()
        self.on_fit_batch_end(batch, None, loss, True)
        return loss.detach().cpu()

    def optimizers_step(self):
        valid = self.freeze_optimizers(self.optimizers_dict)
        for opt in valid.values():
            torch.nn.utils.clip_grad_norm_(
                [p for g in opt.param_groups for p in g["params"]], self.hparams.max_grad_norm
            )
        for opt in valid.values():
            opt.step()
        for opt in valid.values():
            opt.zero_grad(set_to_none=True)
        self.optimizer_step += 1

    def fit(self, training, steps, valid_every):
        self.on_stage_start(Stage.TRAIN, 0)
        for step in training.steps(until=steps):
            with step as batch:
                self.modules.train()
                self.step += 1
                loss = self.fit_batch(batch)
                self.avg_train_loss = self.update_average(loss, self.avg_train_loss)
                if self.step % valid_every == 0:
                    self.on_stage_end(Stage.TRAIN, self.avg_train_loss, self.step // valid_every)
                    self.avg_train_loss, self.step = 0.0, 0


class ASR(Brain):
    def init_optimizers(self):
        self.enc_opt = torch.optim.Adadelta(self.modules.enc.parameters(), lr=1.0)
        self.optimizer = self.opt_class(self.modules.out.parameters())
        self.optimizers_dict = {"enc": self.enc_opt, "out": self.optimizer}

    def freeze_optimizers(self, optimizers):
        return {"out": optimizers["out"]} if self.optimizer_step < self.hparams.warmup else optimizers

    def compute_forward(self, batch, stage):
        return self.modules.out(self.modules.enc(self.modules.norm(batch[0], batch[2])))

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.last = float(loss)

    def on_stage_start(self, stage, epoch):
        self.stats = {stage.name: []}

    def on_stage_end(self, stage, stage_loss, epoch):
        old, new = self.hparams.lr_annealing(stage_loss)
        for group in self.optimizer.param_groups:
            group["lr"] = new
        self.stats[stage.name].append({"loss": stage_loss, "lr": old, "epoch": epoch})


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(1986)
    modules = {
        "norm": InputNormalization(),
        "enc": DDP(nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU())),
        "out": DDP(nn.Linear(12, 3)),
    }
    brain = ASR(
        modules,
        lambda p: torch.optim.SGD(p, lr=0.2),
        dict(max_grad_norm=1.0, warmup=3, lr_annealing=NewBobScheduler(0.2, improvement_threshold=0.1)),
    )
    training = relight.Training(
        model=brain.modules,
        optimizer=brain.optimizers_dict,
        data=lambda n: (torch.randn(8, 6), torch.randint(0, 3, (8,)), torch.randint(0, 4, (8,))),
    )
    brain.fit(training, 17, 4)
    norm = modules["norm"]
    finish(
        job,
        modules=brain.modules,
        enc=brain.enc_opt,
        out=brain.optimizer,
        mean=norm.glob_mean,
        spk=norm.spk_dict_mean,
        count=norm.spk_dict_count,
        stats=[list(s.values()) for s in brain.stats["TRAIN"]],
        avg=brain.avg_train_loss,
        last=brain.last,
        sched=brain.hparams.lr_annealing.metric_values,
    )
