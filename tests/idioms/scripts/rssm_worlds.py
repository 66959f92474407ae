"""A recurrent world model: a nested dict of latents by name goes on, KL balanced by a free-nats average, episodes by chunks."""

# ranks: 2
from collections import namedtuple

import torch
import torch.distributions as D
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_map

import relight
from tests.idioms.digest import finish

Latent = namedtuple("Latent", ["deter", "stoch", "dist"])


class RSSM(nn.Module):
    def __init__(self, deter=8, stoch=4):
        super().__init__()
        self.cell, self.prior, self.post = (
            nn.GRUCell(stoch + 2, deter),
            nn.Linear(deter, 2 * stoch),
            nn.Linear(deter + 5, 2 * stoch),
        )
        self.decode = nn.Linear(deter + stoch, 5)

    def initial(self, n):
        zeros = torch.zeros(n, 4)
        return {
            "latent": Latent(torch.zeros(n, 8), zeros, {"mean": zeros, "std": torch.ones(n, 4)}),
            "first": torch.ones(n, dtype=torch.bool),
        }

    def dist_of(self, stats):
        mean, std = stats.chunk(2, -1)
        return {"mean": mean, "std": nn.functional.softplus(std) + 0.1}

    def forward(self, obs, actions, reset, carry):
        losses, recon = [], []
        latent = carry["latent"]
        for t in range(obs.size(1)):
            keep = (~(reset[:, t] | carry["first"])).float()[:, None]
            latent = tree_map(lambda v: v * keep if isinstance(v, torch.Tensor) else v, latent)
            deter = self.cell(torch.cat([latent.stoch, actions[:, t]], 1), latent.deter)
            prior = self.dist_of(self.prior(deter))
            post = self.dist_of(self.post(torch.cat([deter, obs[:, t]], 1)))
            stoch = D.Normal(post["mean"], post["std"]).rsample()
            losses.append(
                D.kl_divergence(D.Normal(post["mean"], post["std"]), D.Normal(prior["mean"], prior["std"])).sum(1)
            )
            recon.append(self.decode(torch.cat([deter, stoch], 1)))
            latent = Latent(deter, stoch, post)
            carry = {"latent": latent, "first": torch.zeros_like(carry["first"])}
        return torch.stack(recon, 1), torch.stack(losses, 1), carry


class Moments:
    def __init__(self, momentum=0.9):
        self.mom, self.low, self.high = momentum, torch.zeros(()), torch.ones(())

    def __call__(self, x):
        self.low = self.mom * self.low + (1 - self.mom) * torch.quantile(x, 0.05)
        self.high = self.mom * self.high + (1 - self.mom) * torch.quantile(x, 0.95)
        return self.low, torch.clamp(self.high - self.low, min=0.1)


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(35)
    model = DDP(RSSM())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = relight.Training(
        model=model,
        optimizer=optimizer,
        data=lambda n: {"obs": torch.randn(3, 4, 5), "action": torch.randn(3, 4, 2), "reset": torch.rand(3, 4) < 0.15},
    )
    carry, moments, tables = model.module.initial(3), Moments(), {"kl": [], "free": 1.0}
    for step in training.steps(until=15):
        with step as batch:
            recon, kl, carry = model(batch["obs"], batch["action"], batch["reset"], carry)
            carry = tree_map(lambda v: v.detach(), carry)
            offset, scale = moments(kl.detach())
            loss = (recon - batch["obs"]).square().mean() + (
                torch.clamp((kl - offset) / scale, min=tables["free"])
            ).mean()
            optimizer.zero_grad()
            loss.backward()
            tables["kl"].append(kl.mean().item())
            tables["free"] *= 0.9 if tables["kl"][-1] > sum(tables["kl"]) / len(tables["kl"]) else 1.02
            optimizer.step()
    finish(
        job,
        model=model,
        opt=optimizer,
        deter=carry["latent"].deter,
        stoch=carry["latent"].stoch,
        mean=carry["latent"].dist["mean"],
        low=moments.low,
        high=moments.high,
        tables=tables,
    )
