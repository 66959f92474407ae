"""A world model, an actor and a critic one after another, with returns normalized by percentiles that follow all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class RequiresGrad:
    def __init__(self, model):
        self._model = model

    def __enter__(self):
        self._model.requires_grad_(requires_grad=True)

    def __exit__(self, *args):
        self._model.requires_grad_(requires_grad=False)


class RewardEMA:
    def __init__(self, alpha=0.05):
        self.alpha = alpha
        self.range = torch.tensor([0.05, 0.95])

    def __call__(self, x, ema_vals):
        quantile = torch.quantile(x.detach().flatten(), self.range)
        dist.all_reduce(quantile)
        quantile /= dist.get_world_size()
        ema_vals[:] = self.alpha * quantile + (1 - self.alpha) * ema_vals
        return ema_vals[0].detach(), torch.clip(ema_vals[1] - ema_vals[0], min=1.0).detach()


class Optimizer:
    def __init__(self, name, parameters, lr, clip):
        self._name, self._parameters, self._clip = name, list(parameters), clip
        self._opt = torch.optim.Adam(self._parameters, lr=lr)

    def __call__(self, loss, retain_graph=False):
        self._opt.zero_grad()
        loss.backward(retain_graph=retain_graph)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._opt.step()
        self._opt.zero_grad()
        return {f"{self._name}_loss": loss.item(), f"{self._name}_grad_norm": norm.item()}


class Behavior(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema_vals", torch.zeros((2,)))


def main():
    job = relight.init()
    torch.manual_seed(40)
    world = DDP(nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 5)))
    actor = DDP(nn.Sequential(nn.Linear(4, 12), nn.SiLU(), nn.Linear(12, 2)))
    value = DDP(nn.Sequential(nn.Linear(4, 12), nn.SiLU(), nn.Linear(12, 1)))
    behavior, reward_ema = Behavior(), RewardEMA()
    model_opt = Optimizer("model", world.parameters(), 3e-3, 10)
    actor_opt = Optimizer("actor", actor.parameters(), 3e-3, 10)
    value_opt = Optimizer("value", value.parameters(), 3e-3, 10)
    for part in (world, actor, value):
        part.requires_grad_(requires_grad=False)
    training = relight.Training(
        model={"world": world, "actor": actor, "value": value, "behavior": behavior},
        optimizer={"world": model_opt._opt, "actor": actor_opt._opt, "value": value_opt._opt},
        data=lambda n: torch.randn(8, 4),
    )
    metrics = {}
    for step in training.steps(until=14):
        with step as obs:
            with RequiresGrad(world):
                act = torch.randn(len(obs), 2)
                out = world(torch.cat([obs, act], 1))
                metrics.update(
                    model_opt((out[:, :4] - obs.roll(1, 1)).pow(2).mean() + (out[:, 4] - act.sum(1)).pow(2).mean())
                )
            with RequiresGrad(actor):
                imag, rewards, states = obs, [], [obs]
                for _ in range(3):
                    out = world.module(torch.cat([imag, actor(imag).tanh()], 1))
                    imag, reward = out[:, :4], out[:, 4:]
                    rewards.append(reward)
                    states.append(imag)
                target = value.module(imag)
                for reward in reversed(rewards):
                    target = reward + 0.9 * target
                offset, scale = reward_ema(target, behavior.ema_vals)
                metrics.update(actor_opt(-((target - offset) / scale).mean()))
            with RequiresGrad(value):
                states = torch.cat(states[:-1]).detach()
                metrics.update(value_opt((value(states) - target.detach().repeat(3, 1)).pow(2).mean()))
    finish(
        job,
        world=world,
        actor=actor,
        value=value,
        ema=behavior,
        opts=[model_opt._opt, actor_opt._opt, value_opt._opt],
        metrics=metrics,
    )


if __name__ == "__main__":
    main()
