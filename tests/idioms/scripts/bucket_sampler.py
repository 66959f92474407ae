"""Batches by length: a batch sampler that shuffles buckets, an epoch with a remainder, padding in collate, loss over tokens."""

# ranks: 2
import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

import relight
from tests.idioms.digest import finish


class Lines(Dataset):
    def __init__(self, n=46):
        g = np.random.default_rng(0)
        self.lines = [g.integers(1, 12, size=g.integers(3, 10)).tolist() for _ in range(n)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        line = list(self.lines[i])
        if np.random.rand() < 0.3:
            line[np.random.randint(len(line))] = 0
        return torch.tensor(line)


class DistributedBucketSampler(Sampler):
    def __init__(self, lengths, batch_size, boundaries, rank, world):
        self.lengths, self.batch_size, self.boundaries, self.rank, self.world, self.epoch = (
            lengths,
            batch_size,
            boundaries,
            rank,
            world,
            0,
        )
        self.buckets = [[] for _ in boundaries]
        for i, n in enumerate(lengths):
            self.buckets[next(b for b, limit in enumerate(boundaries) if n <= limit)].append(i)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator()
        g.manual_seed(self.epoch)
        batches = []
        for bucket in self.buckets:
            ids = [bucket[i] for i in torch.randperm(len(bucket), generator=g).tolist()]
            total = math.ceil(len(ids) / (self.batch_size * self.world)) * self.batch_size * self.world
            ids = (ids * (total // max(len(ids), 1) + 1))[:total]
            ids = ids[self.rank :: self.world]
            batches += [ids[j : j + self.batch_size] for j in range(0, len(ids), self.batch_size)]
        order = torch.randperm(len(batches), generator=g).tolist()
        return iter([batches[i] for i in order])

    def __len__(self):
        return sum(math.ceil(len(b) / (self.batch_size * self.world)) for b in self.buckets)


def collate(batch):
    lengths = torch.tensor([len(x) for x in batch])
    return nn.utils.rnn.pad_sequence(batch, batch_first=True), lengths


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = (
            nn.Embedding(12, 8),
            nn.LSTM(8, 8, batch_first=True, bidirectional=True),
            nn.Linear(16, 12),
        )

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        return self.out(nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0])


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(4)
    data = Lines()
    sampler = DistributedBucketSampler([len(x) for x in data.lines], 4, [4, 7, 10], job.rank, job.world_size)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    tokens, longest = 0, 0
    for step in training.steps(until=3 * len(loader)):
        with step as (x, lengths):
            logits = model(x, lengths)
            mask = torch.arange(x.size(1))[None] < lengths[:, None]
            count = mask.sum().float()
            loss = nn.functional.cross_entropy(logits[mask], x[mask], reduction="sum")
            dist.all_reduce(count)
            optimizer.zero_grad()
            (loss * job.world_size / count).backward()
            tokens += int(count)
            longest = max(longest, x.size(1))
            optimizer.step()
    finish(job, model=model, opt=optimizer, tokens=tokens, longest=longest)
