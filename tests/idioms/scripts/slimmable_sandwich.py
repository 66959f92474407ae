"""Universally slimmable networks: a width that model.apply sets on each layer, the sandwich rule with several backward
passes, inplace distillation, FLAGS as a global attribute dict, statistics of each width."""

# ranks: 2
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AttrDict(dict):
    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


FLAGS = AttrDict(width_mult=1.0, width_mult_range=[0.25, 1.0], num_sample_training=4, cumulative_bn_stats=True)


class USLinear(nn.Linear):
    def __init__(self, in_features, out_features, us=(True, True)):
        super().__init__(in_features, out_features)
        self.in_features_max, self.out_features_max = in_features, out_features
        self.width_mult, self.us = None, us

    def forward(self, x):
        if self.us[0]:
            self.in_features = max(1, int(self.in_features_max * self.width_mult))
        if self.us[1]:
            self.out_features = max(1, int(self.out_features_max * self.width_mult))
        return F.linear(x, self.weight[: self.out_features, : self.in_features], self.bias[: self.out_features])


class USNorm(nn.Module):
    def __init__(self, num):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(num)), nn.Parameter(torch.zeros(num))
        self.register_buffer("running_mean", torch.zeros(num))
        self.width_mult = None

    def forward(self, x):
        n = x.shape[1]
        if self.training:
            self.running_mean[:n].mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return F.layer_norm(x, (n,), self.weight[:n], self.bias[:n])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            USLinear(10, 32, (False, True)), USNorm(32), nn.ReLU(), USLinear(32, 32), USNorm(32), nn.ReLU()
        )
        self.classifier = USLinear(32, 5, (True, False))

    def forward(self, x):
        return self.classifier(self.features(x))


def get_meters(widths):
    return {str(width): {"loss": 0.0, "count": 0} for width in widths}


job = relight.init()
random.seed(1995)
torch.manual_seed(1995)
model = DDP(Net(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
training = relight.Training(
    model=model, optimizer=optimizer, data=lambda n: (torch.randn(8, 10), torch.randint(5, (8,)))
)
meters = get_meters(["max", "min"])
max_width, min_width = FLAGS.width_mult_range[1], FLAGS.width_mult_range[0]
for step in training.steps(until=18):
    with step as (x, y):
        optimizer.zero_grad()
        widths = [
            random.Random(step.number * 7 + k).uniform(min_width, max_width)
            for k in range(FLAGS.num_sample_training - 2)
        ]
        for i, width_mult in enumerate([max_width, min_width, *widths]):
            FLAGS.width_mult = width_mult
            model.apply(lambda m: setattr(m, "width_mult", width_mult))
            with model.no_sync() if i < FLAGS.num_sample_training - 1 else torch.enable_grad():
                output = model(x)
                if width_mult == max_width:
                    loss = F.cross_entropy(output, y)
                    soft_target = output.detach().softmax(1)
                else:
                    loss = -(soft_target * output.log_softmax(1)).sum(1).mean()
                loss.backward()
            if i < 2:
                meter = meters["max" if i == 0 else "min"]
                reduced = loss.detach().clone()
                dist.all_reduce(reduced)
                meter["loss"] += reduced.item()
                meter["count"] += 1
        optimizer.step()
finish(job, model=model, optimizer=optimizer, meters=meters, flags=FLAGS)
