"""Parametrizations: weight_norm, orthogonal maps and a symmetric layer, by torch.nn.utils.parametrize; weights are computed
in forward. Spectral norm as a parametrization moves buffers."""

import torch
import torch.nn as nn
import torch.nn.utils.parametrizations as P
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parametrize

import relight
from tests.idioms.digest import finish


class Symmetric(nn.Module):
    def forward(self, X):
        return X.triu() + X.triu(1).transpose(-1, -2)

    def right_inverse(self, A):
        return A.triu()


def build_model():
    symmetric = nn.Linear(8, 8)
    parametrize.register_parametrization(symmetric, "weight", Symmetric())
    return nn.Sequential(
        P.weight_norm(nn.Linear(6, 8)),
        nn.Tanh(),
        symmetric,
        nn.Tanh(),
        P.orthogonal(nn.Linear(8, 8), orthogonal_map="householder"),
        nn.Tanh(),
        P.spectral_norm(nn.Linear(8, 2)),
    )


job = relight.init()
torch.manual_seed(29)
model = DDP(build_model())
optim = torch.optim.Adamax(model.parameters(), lr=5e-3)
for step in relight.Training(model=model, optimizer=optim, data=lambda n: torch.randn(7, 6)).steps(until=14):
    with step as x:
        optim.zero_grad()
        nn.functional.cross_entropy(model(x), (x.sum(-1) > 0).long()).backward()
        optim.step()
finish(job, model=model, optim=optim)
