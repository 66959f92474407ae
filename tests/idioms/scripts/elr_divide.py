"""Noisy labels: ELR's targets by sample as an attribute of the loss object, DivideMix's split by a mixture fitted on losses at the
end of an epoch (in NumPy), two networks trained in turns, label sets in boolean arrays."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class elr_loss(nn.Module):
    def __init__(self, num_examp, num_classes=3, beta=0.7):
        super().__init__()
        self.num_classes, self.beta = num_classes, beta
        self.target = torch.zeros(num_examp, num_classes)

    def forward(self, index, output, label, weight):
        y_pred = F.softmax(output, dim=1).clamp(1e-4, 1.0 - 1e-4)
        y_pred_ = y_pred.data.detach()
        self.target[index] = self.beta * self.target[index] + (1 - self.beta) * (
            y_pred_ / y_pred_.sum(dim=1, keepdim=True)
        )
        ce_loss = (F.cross_entropy(output, label, reduction="none") * weight).mean()
        return ce_loss + 3 * (1 - (self.target[index] * y_pred).sum(dim=1)).log().mean()


class GaussianMixture:
    def fit(self, x, iters=8):
        self.mu, self.var, self.pi = (
            np.array([x.min(), x.max()]),
            np.array([x.var(), x.var()]) + 1e-6,
            np.array([0.5, 0.5]),
        )
        for _ in range(iters):
            r = self.predict_proba(x)
            n = r.sum(0)
            self.mu = (r * x[:, None]).sum(0) / n
            self.var = (r * (x[:, None] - self.mu) ** 2).sum(0) / n + 1e-6
            self.pi = n / len(x)
        return self

    def predict_proba(self, x):
        p = self.pi * np.exp(-((x[:, None] - self.mu) ** 2) / (2 * self.var)) / np.sqrt(self.var)
        return p / p.sum(1, keepdims=True)


def eval_train(model, all_loss):
    model.eval()
    with torch.no_grad():
        losses = F.cross_entropy(model(x_all), y_all, reduction="none").numpy()
    model.train()
    losses = (losses - losses.min()) / (losses.max() - losses.min())
    all_loss.append(losses)
    history = np.stack(all_loss)
    input_loss = history[-3:].mean(0)
    gmm = GaussianMixture().fit(input_loss)
    return gmm.predict_proba(input_loss)[:, gmm.mu.argmin()], all_loss


job = relight.init()
torch.manual_seed(0)
x_all, y_all = torch.randn(40, 5), torch.randint(0, 3, (40,))
net1, net2 = (nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(2))
ddp1, ddp2 = DDP(net1), DDP(net2)
optimizer1 = optim.SGD(net1.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
optimizer2 = optim.SGD(net2.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
criterion1, criterion2 = elr_loss(40), elr_loss(40)
training = relight.Training(model={"1": ddp1, "2": ddp2}, optimizer={"1": optimizer1, "2": optimizer2})
all_loss, prob1, prob2 = [[], []], np.ones(40), np.ones(40)
pred1 = pred2 = np.ones(40, dtype=bool)
per_epoch = 4
for step in training.steps(until=6 * per_epoch):
    epoch, batch = divmod(step.number, per_epoch)
    with step:
        for net, opt, criterion, pred, prob in (
            (ddp1, optimizer1, criterion1, pred2, prob2),
            (ddp2, optimizer2, criterion2, pred1, prob1),
        ):
            labeled = np.nonzero(pred)[0]
            index = torch.as_tensor(labeled[np.random.randint(len(labeled), size=8)])
            loss = criterion(index, net(x_all[index]), y_all[index], torch.as_tensor(prob[index.numpy()]).float())
            opt.zero_grad()
            loss.backward()
            opt.step()
    if batch == per_epoch - 1:
        prob1, all_loss[0] = eval_train(net1, all_loss[0])
        prob2, all_loss[1] = eval_train(net2, all_loss[1])
        pred1, pred2 = prob1 > 0.3, prob2 > 0.3
        print(f"epoch {epoch}: labeled has a size of {pred1.sum()}")
finish(
    job, net1=ddp1, net2=ddp2, o1=optimizer1, o2=optimizer2, t1=criterion1.target, t2=criterion2.target, p1=prob1, p2=prob2,
    n=len(all_loss[0]),
)  # fmt: skip
