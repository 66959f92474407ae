"""LibMTL's dynamic weights: costs in an array by epoch and task, a weighting class mixed in by type() at run time, records with
meters that are reset, uncertainty of tasks as a parameter list, a best result and its epoch after a test."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AbsWeighting(nn.Module):
    def init_param(self):
        pass


class DWA(AbsWeighting):
    def backward(self, losses, **kwargs):
        T = kwargs["T"]
        if self.epoch > 1:
            w_i = torch.Tensor(self.train_loss_buffer[:, self.epoch - 1] / self.train_loss_buffer[:, self.epoch - 2])
            batch_weight = self.task_num * F.softmax(w_i / T, dim=-1)
        else:
            batch_weight = torch.ones_like(losses)
        torch.mul(losses, batch_weight).sum().backward()
        return batch_weight.numpy()


class Arch(nn.Module):
    def __init__(self, task_name, encoder_class, decoders):
        super().__init__()
        self.task_name, self.task_num = task_name, len(task_name)
        self.encoder, self.decoders = encoder_class(), decoders

    def forward(self, inputs):
        rep = self.encoder(inputs)
        return {task: self.decoders[task](rep) for task in self.task_name}


class Meter:
    def __init__(self, task_name):
        self.task_name, self.best_result = task_name, {"improvement": -1e2, "epoch": 0}
        self.reinit()

    def reinit(self):
        self.loss_item, self.loss_list = {t: 0.0 for t in self.task_name}, {t: [] for t in self.task_name}

    def update(self, task, loss):
        self.loss_list[task].append(loss)

    def get_score(self, epoch):
        self.loss_item = {t: float(np.mean(v)) for t, v in self.loss_list.items()}
        improvement = -sum(self.loss_item.values())
        if improvement > self.best_result["improvement"]:
            self.best_result.update(improvement=improvement, epoch=epoch)
        return np.array(list(self.loss_item.values()))


class Trainer(nn.Module):
    def __init__(self, job, epochs, per_epoch):
        super().__init__()
        self.tasks = ["seg", "depth", "normal"]

        class MTLmodel(Arch, DWA):
            pass

        decoders = nn.ModuleDict({t: nn.Linear(12, 1) for t in self.tasks})
        self.model = MTLmodel(self.tasks, lambda: nn.Sequential(nn.Linear(5, 12), nn.Tanh()), decoders)
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.02)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.meter, self.epochs, self.per_epoch, self.job = Meter(self.tasks), epochs, per_epoch, job
        self.model.train_loss_buffer = np.zeros([3, epochs])
        self.batch_weight = np.zeros([3, epochs, per_epoch])

    def train(self):
        training = relight.Training(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        for step in training.steps(until=self.epochs * self.per_epoch):
            epoch, batch = divmod(step.number, self.per_epoch)
            self.model.epoch = epoch
            with step:
                x = torch.randn(8, 5)
                preds = self.model(x)
                losses = torch.zeros(3)
                for tn, task in enumerate(self.tasks):
                    losses[tn] = F.mse_loss(preds[task], (x * (tn + 1)).sin().sum(1, keepdim=True))
                    self.meter.update(task, losses[tn].item())
                self.optimizer.zero_grad(set_to_none=False)
                w = self.model.backward(losses, T=2.0)
                for p in self.model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= self.job.world_size
                self.optimizer.step()
                if w is not None:
                    self.batch_weight[:, epoch, batch] = w
            if batch == self.per_epoch - 1:
                scores = torch.tensor(self.meter.get_score(epoch))
                dist.all_reduce(scores)
                self.model.train_loss_buffer[:, epoch] = scores.numpy()
                self.meter.reinit()
                self.scheduler.step()


job = relight.init()
torch.manual_seed(0)
trainer = Trainer(job, 5, 4)
trainer.train()
finish(
    job, model=trainer.model, opt=trainer.optimizer, buffer=trainer.model.train_loss_buffer, w=trainer.batch_weight,
    best=trainer.meter.best_result,
)  # fmt: skip
