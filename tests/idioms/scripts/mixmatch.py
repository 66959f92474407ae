"""MixMatch: two loaders of different lengths, each of which begins anew at its own end, an optimizer that is an average of weights,
rampup of the unlabeled loss, interleaved batches, a meter and a bar."""

# ranks: 2
import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import relight
from tests.idioms.digest import finish


class Pairs(Dataset):
    def __init__(self, n, labeled):
        g = np.random.RandomState(n)
        self.x, self.y, self.labeled = g.randn(n, 8).astype(np.float32), g.randint(4, size=n), labeled

    def __len__(self):
        return len(self.x)

    def augment(self, x):
        return x + 0.1 * np.random.randn(*x.shape).astype(np.float32)

    def __getitem__(self, i):
        if self.labeled:
            return self.augment(self.x[i]), self.y[i]
        return (self.augment(self.x[i]), self.augment(self.x[i])), -1


class WeightEMA:
    def __init__(self, model, ema_model, lr, alpha=0.9):
        self.model, self.ema_model, self.alpha = model, ema_model, alpha
        self.params, self.ema_params = list(model.state_dict().values()), list(ema_model.state_dict().values())
        self.wd = 0.02 * lr
        for param, ema_param in zip(self.params, self.ema_params):
            param.data.copy_(ema_param.data)

    def step(self):
        one_minus_alpha = 1.0 - self.alpha
        for param, ema_param in zip(self.params, self.ema_params):
            if ema_param.dtype == torch.float32:
                ema_param.mul_(self.alpha)
                ema_param.add_(param * one_minus_alpha)
                param.mul_(1 - self.wd)


def linear_rampup(current, rampup_length=3):
    return float(np.clip(current / rampup_length, 0.0, 1.0))


class SemiLoss:
    def __call__(self, outputs_x, targets_x, outputs_u, targets_u, epoch):
        Lx = -torch.mean(torch.sum(F.log_softmax(outputs_x, dim=1) * targets_x, dim=1))
        Lu = torch.mean((torch.softmax(outputs_u, dim=1) - targets_u) ** 2)
        return Lx, Lu, 75 * linear_rampup(epoch)


def interleave(xy, batch):
    nu = len(xy) - 1
    groups = [batch // (nu + 1)] * (nu + 1)
    for x in range(batch - sum(groups)):
        groups[-x - 1] += 1
    offsets = np.cumsum([0, *groups])
    xy = [[v[offsets[p] : offsets[p + 1]] for p in range(nu + 1)] for v in xy]
    for i in range(1, nu + 1):
        xy[0][i], xy[i][i] = xy[i][i], xy[0][i]
    return [torch.cat(v, dim=0) for v in xy]


def create_model():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.1), nn.Linear(32, 4))


def main(batch_size=8, T=0.5, alpha=0.75, train_iteration=8, epochs=3):
    job = relight.init()
    torch.manual_seed(0)
    np.random.seed(job.rank)
    labeled = DataLoader(Pairs(40, True), batch_size, shuffle=True, drop_last=True)
    unlabeled = DataLoader(Pairs(100, False), batch_size, shuffle=True, drop_last=True)
    net = create_model()
    ema_model = copy.deepcopy(net)
    for param in ema_model.parameters():
        param.detach_()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    ema_optimizer = WeightEMA(net, ema_model, 0.002)
    criterion = SemiLoss()
    training = relight.Training(model=model, optimizer=optimizer, ema=ema_model, data=(labeled, unlabeled))
    losses = []
    for step in training.steps(until=epochs * train_iteration):
        with step as batches:
            epoch, batch_idx = divmod(step.number, train_iteration)
            (inputs_x, targets_x), ((inputs_u, inputs_u2), _) = batches
            targets_x = F.one_hot(targets_x, 4).float()
            with torch.no_grad():
                p = (torch.softmax(net(inputs_u), dim=1) + torch.softmax(net(inputs_u2), dim=1)) / 2
                pt = p ** (1 / T)
                targets_u = (pt / pt.sum(dim=1, keepdim=True)).detach()
            all_inputs = torch.cat([inputs_x, inputs_u, inputs_u2], dim=0)
            all_targets = torch.cat([targets_x, targets_u, targets_u], dim=0)
            lam = np.random.beta(alpha, alpha)
            lam = max(lam, 1 - lam)
            idx = torch.randperm(all_inputs.size(0))
            mixed_input = lam * all_inputs + (1 - lam) * all_inputs[idx]
            mixed_target = lam * all_targets + (1 - lam) * all_targets[idx]
            mixed_input = interleave(list(torch.split(mixed_input, batch_size)), batch_size)
            logits = model(torch.cat(mixed_input)).split(batch_size)
            logits = interleave(list(logits), batch_size)
            Lx, Lu, w = criterion(
                logits[0], mixed_target[:batch_size], torch.cat(logits[1:], dim=0), mixed_target[batch_size:],
                epoch + batch_idx / train_iteration,
            )  # fmt: skip
            loss = Lx + w * Lu
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema_optimizer.step()
            losses.append(loss.item())
    finish(job, model=net, ema=ema_model, optimizer=optimizer, losses=losses)


if __name__ == "__main__":
    main()
