"""A ladder of players that is sorted after each game and trimmed, and whose champion an attribute stands for."""

# ranks: 2
import copy
import random
from collections import defaultdict, deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Player:
    count = 0

    def __init__(self, weights):
        self.weights, self.elo, self.games, self.number = weights, 1000.0, 0, Player.count
        self.recent = deque(maxlen=3)
        Player.count += 1


class League:
    def __init__(self, weights):
        self.pool = [Player(copy.deepcopy(weights))]
        self.champion, self.me = self.pool[0], Player(None)
        self.matrix = defaultdict(lambda: defaultdict(float))

    def pick(self):
        return random.choices(self.pool, weights=[1 / (1 + player.games) for player in self.pool])[0]

    def report(self, player, score):
        expected = 1 / (1 + 10 ** ((player.elo - self.me.elo) / 400))
        self.me.elo += 16 * (score - expected)
        player.elo -= 16 * (score - expected)
        player.games += 1
        player.recent.append(score)
        self.matrix[self.me.number][player.number] += score
        self.pool.sort(key=lambda one: -one.elo)
        self.champion = self.pool[0]
        self.champion.games += 0.5

    def snapshot(self, weights):
        self.pool.append(Player(copy.deepcopy(weights)))
        if len(self.pool) > 4:
            self.pool.remove(min(self.pool, key=lambda one: one.elo))


job = relight.init()
torch.manual_seed(0)
net = DDP(nn.Linear(6, 4))
opt = torch.optim.Adam(net.parameters(), 0.02)
league, temperature = League(net.module.state_dict()), 1.0
training = relight.Training(model=net, optimizer=opt)
for step in training.steps(until=16):
    with step:
        opponent, x = league.pick(), torch.randn(8, 6)
        y = F.linear(x, opponent.weights["weight"], opponent.weights["bias"]).argmax(1)
        out = net(x)
        loss = F.cross_entropy(out / temperature, y) - 0.1 * out.var()
        opt.zero_grad()
        loss.backward()
        league.report(opponent, (out.argmax(1) != y).float().mean().item())
        temperature = max(0.5, temperature * (0.98 if league.me.elo > league.champion.elo else 1.01))
        if step.number % 3 == 2:
            league.snapshot(net.module.state_dict())
        opt.step()
finish(
    job,
    net=net,
    opt=opt,
    pool=[(one.number, one.elo, one.games, list(one.recent)) for one in league.pool],
    me=league.me.elo,
    matrix={number: dict(row) for number, row in league.matrix.items()},
    temperature=temperature,
)
