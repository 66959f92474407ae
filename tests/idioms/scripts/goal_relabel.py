"""Hindsight replay: episodes in dicts of arrays, relabelled goals, normalizers that ranks sum up lazily, an archive by cell."""

# ranks: 2
import threading
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Normalizer:
    def __init__(self, size, eps=1e-2, clip=5.0):
        self.size, self.eps, self.clip = size, eps, clip
        self.local_sum, self.local_sumsq, self.local_count = (
            np.zeros(size, np.float32),
            np.zeros(size, np.float32),
            np.zeros(1, np.float32),
        )
        self.total_sum, self.total_sumsq, self.total_count = (
            np.zeros(size, np.float32),
            np.zeros(size, np.float32),
            np.ones(1, np.float32),
        )
        self.mean, self.std, self.lock = np.zeros(size, np.float32), np.ones(size, np.float32), threading.Lock()

    def update(self, v):
        v = v.reshape(-1, self.size)
        with self.lock:
            self.local_sum += v.sum(axis=0)
            self.local_sumsq += np.square(v).sum(axis=0)
            self.local_count[0] += v.shape[0]

    def recompute_stats(self):
        with self.lock:
            local = torch.from_numpy(np.concatenate([self.local_sum, self.local_sumsq, self.local_count]))
            self.local_count[...] = 0
            self.local_sum[...] = 0
            self.local_sumsq[...] = 0
        dist.all_reduce(local)
        parts = np.split(local.numpy(), [self.size, 2 * self.size])
        self.total_sum += parts[0]
        self.total_sumsq += parts[1]
        self.total_count += parts[2]
        self.mean = self.total_sum / self.total_count
        self.std = np.sqrt(np.maximum(np.square(self.eps), self.total_sumsq / self.total_count - np.square(self.mean)))

    def normalize(self, v):
        return np.clip((v - self.mean) / self.std, -self.clip, self.clip).astype(np.float32)


@dataclass
class Cell:
    state: np.ndarray
    score: float
    visits: int = 0
    trail: list = field(default_factory=list)


class Archive(dict):
    def best(self):
        return max(self.values(), key=lambda c: c.score / (1 + c.visits))


class Episodes:
    def __init__(self, capacity, T):
        self.buffers = {
            k: np.empty([capacity, T + (k in ("obs", "ag")), 2], np.float32) for k in ("obs", "ag", "g", "actions")
        }
        self.capacity, self.T, self.current_size, self.lock = capacity, T, 0, threading.Lock()

    def store(self, batch):
        with self.lock:
            idx = self._get_storage_idx()
            for k in self.buffers:
                self.buffers[k][idx] = batch[k]

    def _get_storage_idx(self):
        if self.current_size < self.capacity:
            idx = self.current_size
        else:
            idx = np.random.randint(0, self.capacity)
        self.current_size = min(self.capacity, self.current_size + 1)
        return idx

    def sample(self, n):
        ep, t = np.random.randint(0, self.current_size, n), np.random.randint(self.T, size=n)
        out = {k: v[ep, t].copy() for k, v in self.buffers.items()}
        her = np.where(np.random.uniform(size=n) < 0.8)
        future = (np.random.uniform(size=n) * (self.T - t)).astype(int)
        out["g"][her] = self.buffers["ag"][ep[her], (t + 1 + future)[her]]
        out["next"] = self.buffers["ag"][ep, t + 1]
        return out


def main():
    job = relight.init()
    torch.manual_seed(40)
    rng = np.random.default_rng(job.rank)
    actor = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh()))
    optimizer = torch.optim.Adam(actor.parameters(), lr=0.01)
    o_norm, g_norm, episodes, archive = Normalizer(2), Normalizer(2), Episodes(8, 5), Archive()
    training = relight.Training(model=actor, optimizer=optimizer)
    for step in training.steps(until=15):
        with step:
            start = archive.best() if archive and rng.random() < 0.5 else None
            s = start.state.copy() if start else rng.normal(size=2).astype(np.float32)
            if start:
                start.visits += 1
            goal, rows = rng.normal(size=2).astype(np.float32), {k: [] for k in ("obs", "ag", "g", "actions")}
            for _ in range(5):
                inp = np.concatenate([o_norm.normalize(s), g_norm.normalize(goal)])
                with torch.no_grad():
                    a = actor.module(torch.from_numpy(inp)[None])[0].numpy() + 0.1 * rng.normal(size=2)
                for k, v in zip(rows, (s, s, goal, a)):
                    rows[k].append(v)
                s = (s + 0.3 * a).astype(np.float32)
                key = tuple(np.round(s).astype(int).tolist())
                score = -float(np.abs(s - goal).sum())
                if key not in archive or archive[key].score < score:
                    archive[key] = Cell(s.copy(), score, trail=[*(start.trail if start else []), key][-3:])
            rows["obs"].append(s)
            rows["ag"].append(s)
            episode = {k: np.array(v, np.float32) for k, v in rows.items()}
            episodes.store(episode)
            o_norm.update(episode["obs"])
            g_norm.update(episode["g"])
            if step.number % 2 == 0:
                o_norm.recompute_stats()
                g_norm.recompute_stats()
            b = episodes.sample(8)
            x = torch.from_numpy(np.concatenate([o_norm.normalize(b["obs"]), g_norm.normalize(b["g"])], 1))
            loss = (torch.from_numpy(b["obs"]) + 0.3 * actor(x) - torch.from_numpy(b["g"])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    cells = [(k, c.score, c.visits, c.trail) for k, c in archive.items()]
    finish(
        job,
        actor=actor,
        opt=optimizer,
        mean=o_norm.mean,
        std=g_norm.std,
        cells=cells,
        size=episodes.current_size,
        ag=episodes.buffers["ag"][: episodes.current_size],
        rng=rng.random(),
    )


if __name__ == "__main__":
    main()
