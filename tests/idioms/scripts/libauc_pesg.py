"""A loss with parameters a, b and alpha that the optimizer changes by itself, and a reference model."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AUCM(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, s, y):
        p = y.mean().clamp(0.1, 0.9)
        pos, neg = (y == 1).float(), (y == 0).float()
        return (
            (1 - p) * ((s - self.a) ** 2 * pos).mean()
            + p * ((s - self.b) ** 2 * neg).mean()
            + 2 * self.alpha * (p * (1 - p) + (p * s * neg - (1 - p) * s * pos).mean())
            - p * (1 - p) * self.alpha**2
        ).sum()


class PESG(torch.optim.Optimizer):
    def __init__(self, params, loss_fn, lr=0.05, epoch_decay=0.01):
        self.a, self.b, self.alpha = loss_fn.a, loss_fn.b, loss_fn.alpha
        params = [*params, self.a, self.b]
        self.model_ref = [torch.empty(p.shape).normal_(0, 0.01) for p in params]
        self.model_acc = [torch.zeros(p.shape) for p in params]
        self.T, self.steps = 0, 0
        super().__init__(params, {"lr": lr, "epoch_decay": epoch_decay})

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for i, p in enumerate(group["params"]):
            p.data = p.data - group["lr"] * (p.grad.data + group["epoch_decay"] * (p.data - self.model_ref[i]))
            self.model_acc[i] = self.model_acc[i] + p.data
        self.alpha.data = self.alpha.data + group["lr"] * (2 * (self.b.data - self.a.data) - 2 * self.alpha.data)
        self.alpha.data = torch.clip(self.alpha.data, 0, 999)
        self.T += 1
        self.steps += 1

    def update_regularizer(self):
        self.param_groups[0]["lr"] = self.param_groups[0]["lr"] / 10
        for i in range(len(self.model_ref)):
            self.model_ref[i] = self.model_acc[i] / self.T
            self.model_acc[i] = torch.zeros_like(self.model_acc[i])
        self.T = 0


def main():
    job = relight.init()
    torch.manual_seed(139)
    model = DDP(nn.Linear(5, 1))
    loss_fn = AUCM()
    optimizer = PESG(model.parameters(), loss_fn)
    training = relight.Training(
        model={"net": model, "loss": loss_fn}, optimizer=optimizer, data=lambda n: torch.randn(8, 5)
    )
    for step in training.steps(until=14):
        with step as x:
            y = (x[:, :1] > 0).float()
            loss = loss_fn(torch.sigmoid(model(x)), y)
            optimizer.zero_grad()
            loss.backward()
            for p in (loss_fn.a, loss_fn.b):
                dist.all_reduce(p.grad)
            optimizer.step()
            if step.number == 7:
                optimizer.update_regularizer()
    finish(job, model=model, a=loss_fn.a, b=loss_fn.b, alpha=loss_fn.alpha, ref=optimizer.model_ref)


if __name__ == "__main__":
    main()
