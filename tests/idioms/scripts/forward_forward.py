"""Forward-forward: each layer has its own optimizer as an attribute, and writes before the next layer sees its input."""

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class Layer(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.relu = nn.ReLU()
        self.opt = torch.optim.Adam(self.parameters(), lr=0.03)
        self.threshold = 2.0

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def train_layer(self, x_pos, x_neg):
        for _ in range(2):
            g_pos = self.forward(x_pos).pow(2).mean(1)
            g_neg = self.forward(x_neg).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))).mean()
            self.opt.zero_grad()
            loss.backward()
            for p in self.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad /= dist.get_world_size()
            self.opt.step()
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


class Net(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList([Layer(dims[d], dims[d + 1]) for d in range(len(dims) - 1)])

    def train_net(self, x_pos, x_neg):
        h_pos, h_neg = x_pos, x_neg
        for layer in self.layers:
            h_pos, h_neg = layer.train_layer(h_pos, h_neg)


job = relight.init()
torch.manual_seed(9)
net = Net([10, 16, 16])
training = relight.Training(
    model=net,
    optimizer={f"layer{i}": layer.opt for i, layer in enumerate(net.layers)},
    data=lambda n: torch.randn(6, 10),
)
for step in training.steps(until=15):
    with step as x:
        x_neg = x[torch.randperm(len(x))].flip(1)
        net.train_net(x, x_neg)
finish(job, model=net, optimizers=[layer.opt for layer in net.layers])
