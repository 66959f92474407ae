"""The optimizer's step is fused into backward: a hook of each parameter averages its gradient, writes, and frees it."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(7, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 3))
    optimizer_dict = {p: torch.optim.Adam([p], lr=0.01, foreach=False) for p in model.parameters()}

    def optimizer_hook(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= job.world_size
        optimizer_dict[parameter].step()
        optimizer_dict[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer_hook)
    training = relight.Training(
        model=model,
        optimizer={f"p{i}": o for i, o in enumerate(optimizer_dict.values())},
        data=lambda n: torch.randn(9, 7),
    )
    for step in training.steps(until=14):
        with step as x:
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
    finish(job, model=model, **{f"o{i}": o for i, o in enumerate(optimizer_dict.values())})


if __name__ == "__main__":
    main()
