"""A replay buffer of game histories with nodes of a search, chosen by priority, and old games searched again."""

# ranks: 2
import copy
import math
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class MinMaxStats:
    def __init__(self):
        self.maximum, self.minimum = -float("inf"), float("inf")

    def update(self, value):
        self.maximum, self.minimum = max(self.maximum, value), min(self.minimum, value)

    def normalize(self, value):
        return (value - self.minimum) / (self.maximum - self.minimum) if self.maximum > self.minimum else value


class Node:
    def __init__(self, prior):
        self.visit_count, self.prior, self.value_sum, self.children, self.hidden_state, self.reward = (
            0,
            prior,
            0,
            {},
            None,
            0,
        )

    def expanded(self):
        return len(self.children) > 0

    def value(self):
        return 0 if self.visit_count == 0 else self.value_sum / self.visit_count

    def expand(self, actions, reward, policy_logits, hidden_state):
        self.reward, self.hidden_state = reward, hidden_state
        values = torch.softmax(policy_logits[0], dim=0).tolist()
        for action in actions:
            self.children[action] = Node(values[action])


class GameHistory:
    def __init__(self):
        self.observations, self.actions, self.rewards, self.root_values, self.child_visits = [], [], [], [], []
        self.priorities, self.game_priority, self.reanalysed = None, None, None

    def store(self, root):
        total = sum(c.visit_count for c in root.children.values())
        self.child_visits.append([root.children[a].visit_count / total for a in range(2)])
        self.root_values.append(root.value())


class ReplayBuffer:
    def __init__(self, window):
        self.buffer, self.window, self.num_played_games, self.total_samples = OrderedDict(), window, 0, 0

    def save_game(self, game):
        game.priorities = (
            np.array(np.abs(np.array(game.root_values) - np.array(game.rewards)) ** 0.5, dtype="float32") + 1e-3
        )
        game.game_priority = np.max(game.priorities)
        self.buffer[self.num_played_games] = game
        self.num_played_games += 1
        self.total_samples += len(game.root_values)
        if self.window < len(self.buffer):
            del_id = self.num_played_games - len(self.buffer)
            self.total_samples -= len(self.buffer[del_id].root_values)
            del self.buffer[del_id]

    def sample(self, n):
        probs = np.array([g.game_priority for g in self.buffer.values()], dtype="float32")
        ids = np.random.choice(list(self.buffer.keys()), n, p=probs / probs.sum())
        rows = []
        for i in ids:
            g = self.buffer[int(i)]
            p = np.random.choice(len(g.priorities), p=g.priorities / g.priorities.sum())
            rows.append((int(i), int(p), g.observations[p], g.child_visits[p], g.root_values[p], g.rewards[p]))
        return rows

    def update_priorities(self, rows, errors):
        for (i, p, *_), e in zip(rows, errors):
            if next(iter(self.buffer)) <= i:
                self.buffer[i].priorities[p] = e
                self.buffer[i].game_priority = np.max(self.buffer[i].priorities)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.repr, self.dyn = nn.Linear(3, 8), nn.Linear(10, 8)
        self.pol, self.val = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, obs):
        h = torch.tanh(self.repr(obs))
        return h, self.pol(h), self.val(h)

    def recurrent(self, h, a):
        h = torch.tanh(self.dyn(torch.cat([h, torch.eye(2)[[a]]], 1)))
        return h, self.pol(h), self.val(h)


@torch.no_grad()
def mcts(net, obs, rng):
    root, stats = Node(0), MinMaxStats()
    h, logits, _ = net(torch.from_numpy(obs)[None])
    root.expand(range(2), 0, logits, h)
    noise = rng.dirichlet([0.3, 0.3])
    for a, n in zip(root.children, noise):
        root.children[a].prior = root.children[a].prior * 0.75 + n * 0.25
    for _ in range(4):
        node, path = root, [root]
        while node.expanded():
            score = {
                a: stats.normalize(c.value()) + c.prior * math.sqrt(node.visit_count) / (c.visit_count + 1)
                for a, c in node.children.items()
            }
            action = max(score, key=score.get)
            node = node.children[action]
            path.append(node)
        h, logits, value = net.recurrent(path[-2].hidden_state, action)
        node.expand(range(2), 0, logits, h)
        v = value.item()
        for n in reversed(path):
            n.value_sum += v
            n.visit_count += 1
            stats.update(n.value())
            v = n.reward + 0.95 * v
    return root


def play(net, rng):
    game, s = GameHistory(), rng.normal(size=3).astype(np.float32)
    for _ in range(4):
        root = mcts(net, s, rng)
        visits = np.array([c.visit_count for c in root.children.values()], dtype="int32")
        action = int(rng.choice(2, p=visits / visits.sum()))
        game.observations.append(s)
        game.store(root)
        s = (0.8 * s + 0.2 * (2 * action - 1)).astype(np.float32)
        game.actions.append(action)
        game.rewards.append(float(-np.abs(s).sum()))
    return game


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(0)
    net = Network()
    target = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    training = relight.Training(model={"net": model, "target": target}, optimizer=optimizer)
    rng, buffer = np.random.default_rng(job.rank), ReplayBuffer(6)
    for _ in range(2):
        buffer.save_game(play(target, rng))
    for step in training.steps(until=14):
        with step:
            if step.number % 2 == 0:
                buffer.save_game(play(target, rng))
            rows = buffer.sample(6)
            if step.number % 3 == 2:
                old = buffer.buffer[rows[0][0]]
                old.reanalysed = [mcts(target, o, rng).value() for o in old.observations]
                old.root_values = old.reanalysed
            obs = torch.from_numpy(np.stack([r[2] for r in rows]))
            _, logits, value = model(obs)
            policy = torch.tensor([r[3] for r in rows])
            goal = torch.tensor([r[4] for r in rows]) * 0.5 + torch.tensor([r[5] for r in rows]) * 0.5
            errors = (value[:, 0] - goal).abs()
            loss = nn.functional.cross_entropy(logits, policy) + errors.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            buffer.update_priorities(rows, errors.detach().numpy() ** 0.5 + 1e-3)
            if step.number % 4 == 3:
                target.load_state_dict(net.state_dict())
    games = [(g.priorities, g.root_values, g.actions, g.reanalysed) for g in buffer.buffer.values()]
    finish(
        job,
        net=model,
        target=target,
        opt=optimizer,
        games=games,
        played=buffer.num_played_games,
        samples=buffer.total_samples,
        rng=rng.random(),
    )
