"""A graph network with histories of embeddings outside of the parameters, pushed and pulled by node; sampled neighbours."""

# ranks: 2
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class History(torch.nn.Module):
    def __init__(self, num, dim):
        super().__init__()
        self.emb = torch.zeros(num, dim)  # neither parameter nor buffer
        self.age = np.zeros(num, dtype=np.int64)

    @torch.no_grad()
    def pull(self, ids):
        return self.emb[ids]

    @torch.no_grad()
    def push(self, x, ids):
        self.emb[ids] = x.detach()
        self.age += 1
        self.age[ids.numpy()] = 0


class GNN(nn.Module):
    def __init__(self, adj, num=24, dim=8):
        super().__init__()
        self.adj = adj
        self.inp, self.convs = nn.Linear(4, dim), nn.ModuleList([nn.Linear(2 * dim, dim) for _ in range(2)])
        self.histories, self.out = nn.ModuleList([History(num, dim) for _ in range(2)]), nn.Linear(dim, 3)

    def forward(self, feats, ids, neighbours):
        x = torch.relu(self.inp(feats[ids]))
        for conv, history in zip(self.convs, self.histories):
            old = history.pull(neighbours).mean(1)
            history.push(x, ids)
            x = torch.relu(conv(torch.cat([x, old], 1)))
        return self.out(x)


class NeighborSampler:
    def __init__(self, adj, k, seed):
        self.adj, self.k, self.rng = adj, k, np.random.RandomState(seed)
        self.probs = {v: np.ones(len(n)) / len(n) for v, n in adj.items()}

    def __call__(self, ids):
        return torch.tensor(
            [[int(self.rng.choice(self.adj[v], p=self.probs[v])) for _ in range(self.k)] for v in ids.tolist()]
        )

    def reweight(self, ids, neighbours, score):
        for v, row, s in zip(ids.tolist(), neighbours.tolist(), score.tolist()):
            p = self.probs[v]
            for u in set(row):
                p[self.adj[v].index(u)] *= 1 + 0.1 * s
            self.probs[v] = p / p.sum()


class NodeLoader:
    """Goes through permuted nodes; what remains at the end of a pass goes to the next one."""

    def __init__(self, num, size, rank, world):
        self.ids, self.size, self.rank, self.world = np.arange(num), size, rank, world
        self.order, self.at, self.epoch = self.ids.copy(), num, -1

    def next(self):
        if self.at + self.size > len(self.order) // self.world:
            self.epoch += 1
            np.random.RandomState(self.epoch).shuffle(self.order)
            self.at = 0
        part = self.order[self.rank :: self.world][self.at : self.at + self.size]
        self.at += self.size
        return torch.from_numpy(part.copy())


def main():
    job = relight.init()
    torch.manual_seed(12)
    rs = np.random.RandomState(0)
    adj = {v: sorted(set(rs.randint(0, 24, 5).tolist()) - {v}) for v in range(24)}
    feats, labels = torch.randn(24, 4), torch.randint(0, 3, (24,))
    net = GNN(adj)
    model, sampler = DDP(net), NeighborSampler(adj, 3, job.rank)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.02)
    loader = NodeLoader(24, 5, job.rank, job.world_size)
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=16):
        with step:
            ids = loader.next()
            neighbours = sampler(ids)
            logits = model(feats, ids, neighbours)
            losses = nn.functional.cross_entropy(logits, labels[ids], reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            sampler.reweight(ids, neighbours, losses.detach())
            optimizer.step()
    finish(
        job,
        model=model,
        opt=optimizer,
        emb=[h.emb for h in net.histories],
        age=[h.age for h in net.histories],
        probs=sampler.probs,
        order=loader.order,
        at=loader.at,
        rng=sampler.rng.rand(),
    )


if __name__ == "__main__":
    main()
