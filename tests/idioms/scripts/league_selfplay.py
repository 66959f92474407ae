"""Self-play against a league: snapshots are copied into it now and then, Elo ratings choose the opponent."""

# ranks: 2
import copy
import random
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


@dataclass(order=True)
class Player:
    elo: float
    name: str = field(compare=False)
    weights: dict = field(compare=False, repr=False)
    games: int = field(default=0, compare=False)


class League:
    K = 32

    def __init__(self, net):
        self.players = [Player(1000.0, "init", copy.deepcopy(net.state_dict()))]
        self.main = Player(1000.0, "main", {})
        self.by_name = {p.name: p for p in self.players}

    def pick(self):
        weights = [max(1.0, 400 - abs(p.elo - self.main.elo)) for p in self.players]
        return random.choices(self.players, weights)[0]

    def record(self, opponent, score):
        expected = 1 / (1 + 10 ** ((opponent.elo - self.main.elo) / 400))
        change = self.K * (score - expected)
        self.main.elo += change
        opponent.elo -= change
        opponent.games += 1
        self.main.games += 1

    def promote(self, net, name):
        player = Player(self.main.elo, name, {k: v.detach().clone() for k, v in net.state_dict().items()})
        self.players.append(player)
        self.by_name[name] = player
        self.players.sort(reverse=True)
        del self.players[4:]


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, x):
        return torch.log_softmax(self.head(torch.tanh(self.body(x))), -1)


def play(learner, opponent, seed):
    """Rock, paper, scissors after a hint."""
    hints = torch.randn(12, 5)
    logp = learner(hints)
    a = torch.multinomial(logp.exp().detach(), 1).squeeze(1)
    with torch.no_grad():
        b = torch.multinomial(opponent(hints).exp(), 1).squeeze(1)
    reward = torch.tensor([0.0, 1.0, -1.0])[(a - b) % 3] + 0.1 * hints[:, 0] * (a == 0)
    return logp.gather(1, a[:, None]).squeeze(1), reward


def main():
    job = relight.init()
    torch.manual_seed(9)
    net = Policy()
    opponent_net = Policy().requires_grad_(False)
    league = League(net)
    model = DDP(net)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True)
    training = relight.Training(model=model, optimizer=optimizer, per_rank={"opponent": opponent_net})
    streak = 0
    for step in training.steps(until=16):
        with step:
            opponent = league.pick()
            opponent_net.load_state_dict(opponent.weights)
            logp, reward = play(model, opponent_net, step.number)
            optimizer.zero_grad()
            (-logp * (reward - reward.mean())).mean().backward()
            score = (reward.mean() > 0).float()
            dist.all_reduce(score)
            mine = (reward.mean() > 0).float().item()
            league.record(opponent, mine)
            optimizer.step()
            streak = streak + 1 if score.item() >= 1 else 0
            if streak == 2 or step.number % 6 == 5:
                league.promote(net, f"v{step.number}")
                streak = 0
    finish(
        job,
        net=model,
        opponent=opponent_net,
        opt=optimizer,
        elo=[p.elo for p in league.players],
        names=[p.name for p in league.players],
        weights=[p.weights for p in league.players],
        games=league.main.games,
        known=[(k, p.elo) for k, p in league.by_name.items()],
    )


if __name__ == "__main__":
    main()
