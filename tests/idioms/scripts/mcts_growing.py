"""Self-play with a search tree that grows: nodes with parents and children (cycles), visit counts that choose the next action."""

# ranks: 2
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Node:
    def __init__(self, parent, prior):
        self.parent, self.prior = parent, prior
        self.children = {}
        self.n, self.w = 0, 0.0

    def ucb(self, c=1.4):
        q = self.w / self.n if self.n else 0.0
        return q + c * self.prior * math.sqrt(self.parent.n + 1) / (1 + self.n)

    def select(self):
        node = self
        while node.children:
            node = max(node.children.values(), key=lambda child: child.ucb())
        return node

    def backup(self, v):
        node = self
        while node is not None:
            node.n += 1
            node.w += v
            node = node.parent


def main():
    job = relight.init()
    torch.manual_seed(21)
    net = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    opt = torch.optim.SGD(net.parameters(), 0.05)
    training = relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(4, 4))
    root = Node(None, 1.0)
    for step in training.steps(until=14):
        with step as x:
            leaf = root.select()
            out = net(x)
            p = out.detach().mean(0).softmax(0)
            for a in range(3):
                leaf.children[a] = Node(leaf, float(p[a]))
            loss = (out - x * leaf.prior).pow(2).mean()
            leaf.backup(float(p[3]))
            opt.zero_grad()
            loss.backward()
            opt.step()
    finish(job, net=net, opt=opt, n=root.n, w=root.w, kids=[c.n for c in root.children.values()])


if __name__ == "__main__":
    main()
