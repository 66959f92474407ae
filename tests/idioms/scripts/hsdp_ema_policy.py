"""Hybrid sharded FSDP2 with a mixed-precision policy, accumulation without reductions, and an average of the shards."""

# ranks: 4
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import relight
from tests.idioms.digest import finish


class ShardedEma:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 - self.decay)

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        for name, value in state.items():
            self.shadow[name].copy_(value)


def main():
    job = relight.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 12), nn.SiLU(), nn.Linear(12, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    ema = ShardedEma(model, 0.9)
    training = relight.Training(model=model, optimizer=optimizer, ema=ema, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=12):
        with step as x:
            for i, chunk in enumerate(x.chunk(2)):
                model.set_requires_gradient_sync(i == 1)
                (model(chunk).float() - chunk[:, :2]).square().mean().backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            if total.isfinite():
                optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
    finish(job, model=model, optimizer=optimizer, ema=ema.shadow)


if __name__ == "__main__":
    main()
