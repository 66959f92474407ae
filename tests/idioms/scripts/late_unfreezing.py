"""Fine-tuning with a frozen backbone that thaws layer by layer; the optimizer gets each layer's group when it thaws.

add_param_group in the middle of training; gradients that appear late (find_unused_parameters); requires_grad changes.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class GradualUnfreezer:
    def __init__(self, layers, optimizer, every):
        self.layers, self.optimizer, self.every = layers, optimizer, every

    def maybe_thaw(self, number):
        if number and number % self.every == 0 and number // self.every <= len(self.layers):
            layer = self.layers[-(number // self.every)]
            for p in layer.parameters():
                p.requires_grad = True
            self.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})


def main():
    job = relight.init()
    torch.manual_seed(14)
    backbone = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12)])
    head = nn.Linear(12, 4)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = backbone, head

        def forward(self, x):
            for layer in self.backbone:
                x = torch.relu(layer(x))
            return self.head(x)

    net = Classifier()
    model = DDP(net, find_unused_parameters=True)  # built while all take gradients
    for p in backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-2, momentum=0.9)
    unfreezer = GradualUnfreezer(backbone, optimizer, every=5)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=20):
        with step as x:
            unfreezer.maybe_thaw(step.number)
            loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
