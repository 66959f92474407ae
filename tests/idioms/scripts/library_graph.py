"""A graph of an installed library that grows with each step, and is not handed over; learning starts late."""

# ranks: 2
import random

import networkx
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

LEARNING_STARTS = 5


class Maze:
    def __init__(self, graph):
        self.graph, self.position = graph, 0

    def step(self, action):
        new = len(self.graph)
        self.graph.add_edge(max(self.graph), new, weight=1 + action)
        self.position = random.choice(sorted(self.graph))
        depth = networkx.shortest_path_length(self.graph, 0)[self.position]
        return torch.tensor([float(self.position), float(depth), float(new)]) / 10, -float(depth)


job = relight.init()
torch.manual_seed(5)
graph = networkx.Graph()
graph.add_node(0)
maze = Maze(graph)
net = DDP(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)))
opt = torch.optim.Adam(net.parameters(), 0.02)
memory, obs = [], torch.zeros(3)
training = relight.Training(model=net, optimizer=opt)
for step in training.steps(until=16):
    with step:
        action = random.randrange(2)
        seen, reward = maze.step(action)
        memory.append((obs, action, reward))
        obs = seen
        if step.number >= LEARNING_STARTS:
            batch = random.sample(memory, 4)
            states = torch.stack([state for state, _, _ in batch])
            chosen = net(states)[torch.arange(4), torch.tensor([action for _, action, _ in batch])]
            loss = F.mse_loss(chosen, torch.tensor([reward for _, _, reward in batch]))
            opt.zero_grad()
            loss.backward()
            opt.step()
finish(job, net=net, opt=opt, obs=obs, edges=[list(edge) for edge in sorted(graph.edges)], position=maze.position)
