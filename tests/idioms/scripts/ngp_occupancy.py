"""A radiance field with an occupancy grid refreshed now and then, learned poses, rays weighted by an error map."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Renderer(nn.Module):
    def __init__(self, grid=4, thresh=0.2):
        super().__init__()
        self.grid_size, self.density_thresh, self.mean_density, self.iter_density, self.local_step = (
            grid,
            thresh,
            0,
            0,
            0,
        )
        self.register_buffer("density_grid", torch.zeros(grid**3))
        self.register_buffer("density_bitfield", torch.zeros(grid**3 // 8, dtype=torch.uint8))
        self.register_buffer("step_counter", torch.zeros(16, 2, dtype=torch.int32))
        self.mean_count = 0

    @torch.no_grad()
    def update_extra_state(self, decay=0.95):
        tmp = -torch.ones_like(self.density_grid)
        if self.iter_density < 2:
            idx = torch.arange(self.grid_size**3)
        else:
            occ = torch.nonzero(self.density_grid > 0).squeeze(-1)
            rand = torch.randint(0, self.grid_size**3, (16,))
            idx = (
                torch.cat([rand, occ[torch.randint(0, max(len(occ), 1), (16,)) % max(len(occ), 1)]])
                if len(occ)
                else rand
            )
        xyz = torch.stack([idx // 16, idx // 4 % 4, idx % 4], 1).float() / self.grid_size
        tmp[idx] = self.density(xyz + (torch.rand_like(xyz) * 2 - 1) * 0.1)
        valid = (self.density_grid >= 0) & (tmp >= 0)
        self.density_grid[valid] = torch.maximum(self.density_grid[valid] * decay, tmp[valid])
        self.mean_density = torch.mean(self.density_grid.clamp(min=0)).item()
        self.iter_density += 1
        bits = (self.density_grid > min(self.mean_density, self.density_thresh)).view(-1, 8).to(torch.uint8)
        self.density_bitfield = (bits << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)
        total = min(16, self.local_step)
        if total > 0:
            self.mean_count = int(self.step_counter[:total, 0].sum().item() / total)
        self.local_step = 0

    def march(self, o, d):
        t = torch.linspace(0, 1, 6)[None, :, None] + 0.05 * torch.rand(len(o), 1, 1)
        pts = (o[:, None] + d[:, None] * t).clamp(0, 0.99)
        cell = (pts * self.grid_size).long()
        flat = cell[..., 0] * 16 + cell[..., 1] * 4 + cell[..., 2]
        alive = (self.density_bitfield[flat // 8] >> (flat % 8).to(torch.uint8)) & 1
        counter = self.step_counter[self.local_step % 16]
        counter.zero_()
        counter[0], counter[1] = int(alive.sum()), len(o)
        self.local_step += 1
        return pts, alive.float() if self.iter_density > 1 else torch.ones(flat.shape)


class Field(Renderer):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
        self.poses = nn.Parameter(torch.zeros(5, 3))

    def density(self, x):
        return torch.nn.functional.softplus(self.net(x)[..., 0])

    def forward(self, o, d, cam):
        pts, alive = self.march(o + 0.1 * self.poses[cam], d)
        out = self.net(pts)
        w = torch.nn.functional.softplus(out[..., 0]) * alive
        return (w[..., None] * out[..., 1:].sigmoid()).sum(1) / (w.sum(1, keepdim=True) + 1e-2)


def main():
    job = relight.init()
    torch.manual_seed(15)
    field = Field()
    model = DDP(field, broadcast_buffers=False)
    base = [p for n, p in model.named_parameters() if "poses" not in n]
    optimizer = torch.optim.Adam(
        [{"params": base, "lr": 1e-2}, {"params": [field.poses], "lr": 1e-3}], betas=(0.9, 0.99), eps=1e-15
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: 0.1 ** min(it / 20, 1))
    error_map = torch.ones(5, 16)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler)
    global_step = 0
    for step in training.steps(until=18):
        with step:
            if global_step % 4 == 0:
                field.update_extra_state()
            global_step += 1
            cam = torch.randint(0, 5, (8,))
            coarse = torch.multinomial(error_map[cam], 1).squeeze(1)
            g = torch.Generator().manual_seed(int(cam.sum()))
            o, d = torch.rand(8, 3, generator=g) * 0.2, torch.rand(8, 3) * 0.5
            truth = torch.stack([coarse / 16, cam / 5, o.sum(1)], 1)
            loss = (model(o, d, cam) - truth).square().mean(1)
            error_map[cam, coarse] = 0.1 * error_map[cam, coarse] + 0.9 * loss.detach()
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
            scheduler.step()
            if global_step % 6 == 0:
                dist.all_reduce(error_map)
                error_map /= job.world_size
    finish(
        job,
        model=model,
        opt=optimizer,
        errors=error_map,
        count=field.mean_count,
        density=field.mean_density,
        it=field.iter_density,
        bits=field.density_bitfield,
        n=global_step,
    )


if __name__ == "__main__":
    main()
