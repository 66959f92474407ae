"""Co-teaching: two networks choose small losses for each other, at a rate that changes with the epoch."""

# ranks: 2
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


class Noisy(Dataset):
    def __init__(self, n=48):
        rng = np.random.RandomState(1)
        self.data = torch.from_numpy(rng.randn(n, 6).astype(np.float32))
        self.targets = torch.from_numpy(rng.randint(0, 3, n))

    def __getitem__(self, index):
        return self.data[index], self.targets[index], index

    def __len__(self):
        return len(self.data)


def loss_coteaching(y_1, y_2, t, forget_rate):
    ind_1 = np.argsort(F.cross_entropy(y_1, t, reduction="none").data.numpy(), kind="stable")
    ind_2 = np.argsort(F.cross_entropy(y_2, t, reduction="none").data.numpy(), kind="stable")
    num_remember = int((1 - forget_rate) * len(t))
    i1, i2 = torch.from_numpy(ind_1[:num_remember].copy()), torch.from_numpy(ind_2[:num_remember].copy())
    return F.cross_entropy(y_1[i2], t[i2]), F.cross_entropy(y_2[i1], t[i1])


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def adjust_learning_rate(optimizer, epoch, plan, betas):
    for param_group in optimizer.param_groups:
        param_group["lr"] = plan[epoch]
        param_group["betas"] = (betas[epoch], 0.999)


def main():
    job = relight.init()
    torch.manual_seed(4)
    train_dataset = Noisy()
    sampler = DistributedSampler(train_dataset, shuffle=True)
    loader = DataLoader(train_dataset, 8, sampler=sampler, drop_last=True)
    cnn1, cnn2 = DDP(net()), DDP(net())
    optimizer1 = torch.optim.Adam(cnn1.parameters(), 0.01)
    optimizer2 = torch.optim.Adam(cnn2.parameters(), 0.01)
    rate_schedule = np.ones(6) * 0.2
    rate_schedule[:3] = np.linspace(0, 0.2, 3)
    loss_by_sample = np.zeros(len(train_dataset))
    training = relight.Training(model={"a": cnn1, "b": cnn2}, optimizer={"a": optimizer1, "b": optimizer2}, data=loader)
    for step in training.steps(until=6 * len(loader)):
        epoch = step.epoch
        with step as (images, labels, indexes):
            adjust_learning_rate(optimizer1, epoch, [0.01] * 3 + [0.005] * 4, [0.9] * 3 + [0.1] * 4)
            adjust_learning_rate(optimizer2, epoch, [0.01] * 3 + [0.005] * 4, [0.9] * 3 + [0.1] * 4)
            logits1, logits2 = cnn1(images), cnn2(images)
            loss_1, loss_2 = loss_coteaching(logits1, logits2, labels, rate_schedule[epoch])
            loss_by_sample[indexes.numpy()] = F.cross_entropy(logits1, labels, reduction="none").detach().numpy()
            optimizer1.zero_grad()
            loss_1.backward()
            optimizer1.step()
            optimizer2.zero_grad()
            loss_2.backward()
            optimizer2.step()
    finish(job, a=cnn1, b=cnn2, o1=optimizer1, o2=optimizer2, losses=loss_by_sample)


if __name__ == "__main__":
    main()
