"""Metric learning with a cross-batch memory that starts late, hard negatives by distance, an index built anew now and then."""

# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class XBM:
    def __init__(self, size, dim):
        self.K = size
        self.feats, self.targets = torch.zeros(size, dim), torch.zeros(size, dtype=torch.long)
        self.ptr = 0

    @property
    def is_full(self):
        return self.targets[-1].item() != 0

    def get(self):
        if self.is_full:
            return self.feats, self.targets
        return self.feats[: self.ptr], self.targets[: self.ptr]

    def enqueue_dequeue(self, feats, targets):
        q_size = len(targets)
        if self.ptr + q_size > self.K:
            self.feats[-q_size:], self.targets[-q_size:] = feats, targets
            self.ptr = 0
        else:
            self.feats[self.ptr : self.ptr + q_size], self.targets[self.ptr : self.ptr + q_size] = feats, targets
            self.ptr += q_size


class ANNIndex:
    built_at = None

    def __init__(self, data):
        self.data, self.vectors, self.negatives = data, None, {}

    @torch.no_grad()
    def build(self, model, step, rank, world):
        model.eval()
        mine = F.normalize(model(self.data[rank::world]), dim=1)
        model.train()
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        self.vectors = torch.stack(parts, 1).flatten(0, 1)
        order = (self.vectors @ self.vectors.T).argsort(1, descending=True)
        self.negatives = {i: [j for j in row.tolist() if j % 4 != i % 4][:3] for i, row in enumerate(order)}
        self.built_at = step


def contrastive(x, t, mem, mt, margin=0.5):
    sim = x @ mem.T
    loss = []
    for i in range(len(x)):
        pos, neg = sim[i][(mt == t[i]) & (sim[i] < 1 - 1e-5)], sim[i][(mt != t[i]) & (sim[i] > margin)]
        loss.append((1 - pos).sum() + (neg.sum() if len(neg) else 0))
    return sum(loss) / len(x)


def main():
    job = relight.init()
    torch.manual_seed(22)
    data = torch.randn(24, 6)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    xbm, index = XBM(32, 5), ANNIndex(data)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randperm(24)[:4])
    margins = []
    for step in training.steps(until=18):
        with step as anchors:
            if step.number % 5 == 0:
                index.build(model.module, step.number, job.rank, job.world_size)
            hard = torch.tensor([index.negatives[int(a)][step.number % 3] for a in anchors])
            ids = torch.cat([anchors, hard])
            targets = ids % 4 + 1
            feats = F.normalize(model(data[ids]), dim=1)
            loss = contrastive(feats, targets, feats, targets)
            if step.number >= 3:
                xbm.enqueue_dequeue(feats.detach(), targets)
                loss = loss + contrastive(feats, targets, *xbm.get())
            optimizer.zero_grad()
            loss.backward()
            margins.append((feats[:4] * feats[4:]).sum(1).max().item())
            optimizer.step()
    finish(
        job,
        model=model,
        opt=optimizer,
        feats=xbm.feats,
        targets=xbm.targets,
        ptr=xbm.ptr,
        neg=index.negatives,
        built=index.built_at,
        margins=margins,
        vectors=index.vectors,
    )


if __name__ == "__main__":
    main()
