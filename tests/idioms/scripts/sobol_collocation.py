"""A physics-informed network: points from a Sobol engine that goes on, weights of terms by gradients, points kept by residual."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.quasirandom import SobolEngine

import relight
from tests.idioms.digest import finish


class PINN(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.nu = nn.Parameter(torch.tensor([0.1]))

    def forward(self, points, boundary):
        points = points.requires_grad_(True)
        u = self.net(points)
        du = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        d2 = torch.autograd.grad(du[:, 1].sum(), points, create_graph=True)[0][:, 1]
        return du[:, 0] + u[:, 0] * du[:, 1] - self.nu * d2, self.net(boundary)


if __name__ == "__main__":
    job = relight.init(late_standby=True)  # the engine is made from the rank
    torch.manual_seed(30)
    model = DDP(PINN())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    engine = SobolEngine(2, scramble=True, seed=job.rank)
    points = engine.draw(24)
    weight = torch.ones(1)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in training.steps(until=16):
        with step:
            boundary = torch.cat([torch.zeros(8, 1), torch.rand(8, 1)], 1)
            residual, value = model(points.detach(), boundary)
            physics, data = residual.square().mean(), (value[:, 0] - torch.sin(3 * boundary[:, 1])).square().mean()
            optimizer.zero_grad()
            (physics + weight.item() * data).backward()
            if step.number % 3 == 2:
                ratio = residual.detach().abs().max() / (value.detach().abs().mean() + 1e-3)
                dist.all_reduce(ratio)
                weight = 0.9 * weight + 0.1 * ratio / job.world_size
                worst = residual.detach().abs().topk(12).indices
                points = torch.cat([points[worst].detach(), engine.draw(12)])
            optimizer.step()
            scheduler.step()
    finish(job, model=model, opt=optimizer, points=points, weight=weight, drawn=engine.num_generated)
