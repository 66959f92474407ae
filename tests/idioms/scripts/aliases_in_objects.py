"""Objects that hold one another: a list under two names, a tree with parents, a registry."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Node:
    def __init__(self, parent=None):
        self.parent, self.children, self.value = parent, [], 0.0
        if parent is not None:
            parent.children.append(self)

    def root(self):
        return self if self.parent is None else self.parent.root()


def main():
    job = relight.init()
    torch.manual_seed(31)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    root = Node()
    here = root
    log = []
    views = {"log": log, "last": log}
    pair = (log, views)
    registry = {"root": root, "here": here}
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3] - here.value - len(views["last"]) * 0.01).square().mean()
            loss.backward()
            log.append(round(loss.item(), 6))
            if len(log) > 5:
                pair[0].clear()
            here = Node(here) if step.number % 3 else here.root()
            here.value = 0.5 * here.root().value + loss.item()
            registry["here"].value += 0.1
            registry["here"] = here
            optimizer.step()
    count = lambda node: 1 + sum(count(child) for child in node.children)  # noqa: E731
    finish(job, model=model, log=log, nodes=count(root), value=here.value, same=registry["here"] is here)


if __name__ == "__main__":
    main()
