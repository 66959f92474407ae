"""Go-Explore: an archive of cells, objects with slots that hold copies of the environment; a name that stands for the best of
them, chosen anew in each step."""

# ranks: 2
import copy
import random
from functools import total_ordering

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


@total_ordering
class Cell:
    __slots__ = ("path", "score", "snapshot", "visits")
    __hash__ = None

    def __init__(self, score, path, snapshot):
        self.score, self.path, self.visits, self.snapshot = score, path, 0, snapshot

    def __lt__(self, other):
        return (self.score, -len(self.path)) < (other.score, -len(other.path))

    def __eq__(self, other):
        return (self.score, len(self.path)) == (other.score, len(other.path))


class Maze:
    def __init__(self, seed):
        self.rng, self.pos, self.keys, self.t = random.Random(seed), (0, 0), frozenset(), 0

    def step(self, action):
        dx, dy = MOVES[action if self.rng.random() > 0.1 else self.rng.randrange(4)]
        self.pos = (max(-4, min(4, self.pos[0] + dx)), max(-4, min(4, self.pos[1] + dy)))
        self.t += 1
        is_new = self.pos in ((2, 2), (-3, 1)) and self.pos not in self.keys
        self.keys |= {self.pos} if is_new else frozenset()
        return int(is_new)

    def seen(self):
        return (*self.pos, len(self.keys), self.t / 20.0)


job = relight.init()
torch.manual_seed(6)
policy = DDP(nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 4)))
optimizer = torch.optim.Adam(policy.parameters(), 5e-3)
env = Maze(job.rank)
archive = {(env.pos, 0): Cell(0, (), copy.deepcopy(env))}
training = relight.Training(model=policy, optimizer=optimizer)
for step in training.steps(until=14):
    with step:
        cells = list(archive.values())
        for cell in random.choices(cells, [(each.visits + 1) ** -0.5 for each in cells], k=3):
            cell.visits += 1
            env, score, path = copy.deepcopy(cell.snapshot), cell.score, cell.path
            for _ in range(6):
                with torch.no_grad():
                    chances = policy.module(torch.tensor(env.seen())).softmax(0)
                action = int(torch.multinomial(chances, 1)) if random.random() > 0.3 else random.randrange(4)
                path = (*path, (env.seen(), action))
                score += env.step(action)
                key = (env.pos, len(env.keys))
                new = Cell(score, path, copy.deepcopy(env))
                if key not in archive or archive[key] < new:
                    new.visits = archive[key].visits if key in archive else 0
                    archive[key] = new
        best = max(archive.values())
        shown = best.path[-8:] or (((0.0, 0.0, 0, 0.0), 0),)
        loss = nn.functional.cross_entropy(
            policy(torch.tensor([seen for seen, _ in shown])), torch.tensor([action for _, action in shown])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
found = {str(key): (c.score, c.path, c.visits, c.snapshot.pos, c.snapshot.rng.random()) for key, c in archive.items()}
finish(job, policy=policy, optimizer=optimizer, archive=found, env=(env.pos, env.t))
