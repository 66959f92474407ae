"""A custom autograd.Function (straight-through sign, gradient reversal) with the strength of reversal a module attribute
that the loop anneals, as in domain-adversarial training."""

import math

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ReverseGrad(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.alpha, None


class SignSTE(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1).float()


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature = nn.Linear(8, 16)
        self.class_classifier = nn.Linear(16, 3)
        self.domain_classifier = nn.Linear(16, 2)
        self.alpha = 0.0

    def forward(self, x):
        feature = torch.tanh(self.feature(x)) + 0.1 * SignSTE.apply(self.feature(x))
        return self.class_classifier(feature), self.domain_classifier(ReverseGrad.apply(feature, self.alpha))


def main():
    job = relight.init()
    torch.manual_seed(27)
    n_steps = 18
    model = DDP(DANN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shift = torch.randn(8)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda i: torch.randn(10, 8))
    for step in training.steps(until=n_steps):
        with step as source:
            p = step.number / n_steps
            model.module.alpha = 2.0 / (1.0 + math.exp(-10 * p)) - 1
            classes, domains = model(torch.cat([source, source + shift]))
            labels = source[:, :3].argmax(1)
            domain_labels = torch.cat([torch.zeros(10), torch.ones(10)]).long()
            loss = nn.functional.cross_entropy(classes[:10], labels) + nn.functional.cross_entropy(
                domains, domain_labels
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, alpha=model.module.alpha)


main()
