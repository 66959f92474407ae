"""Neural cellular automata: a pool of states as a class with __slots__ that makes slots from its own arrays, batches that remember
the indices that they came from, the worst state replaced by the seed, damage, and a commit back into the pool."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class SamplePool:
    def __init__(self, *, _parent=None, _parent_idx=None, **slots):
        self._parent = _parent
        self._parent_idx = _parent_idx
        self._slot_names = slots.keys()
        self._size = None
        for k, v in slots.items():
            if self._size is None:
                self._size = len(v)
            assert self._size == len(v)
            setattr(self, k, np.asarray(v))

    def sample(self, n):
        idx = np.random.choice(self._size, n, False)
        batch = {k: getattr(self, k)[idx] for k in self._slot_names}
        return SamplePool(**batch, _parent=self, _parent_idx=idx)

    def commit(self):
        for k in self._slot_names:
            getattr(self._parent, k)[self._parent_idx] = getattr(self, k)


class CAModel(nn.Module):
    def __init__(self, channel_n=6, fire_rate=0.5):
        super().__init__()
        self.channel_n, self.fire_rate = channel_n, fire_rate
        self.fc0, self.fc1 = nn.Conv2d(channel_n * 3, 16, 1), nn.Conv2d(16, channel_n, 1, bias=False)
        nn.init.zeros_(self.fc1.weight)

    def perceive(self, x):
        dx = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8.0
        w = torch.stack([dx, dx.T])[:, None].repeat(self.channel_n, 1, 1, 1)
        return torch.cat([x, F.conv2d(x, w, padding=1, groups=self.channel_n)], 1)

    def forward(self, x, steps=3):
        for _ in range(steps):
            y = self.fc1(F.relu(self.fc0(self.perceive(x))))
            x = x + y * (torch.rand(x[:, :1].shape) <= self.fire_rate)
        return x


def loss_f(x, target):
    return ((x[:, :4] - target) ** 2).mean([-2, -3, -1])


def main():
    job = relight.init()
    torch.manual_seed(2)
    np.random.seed(2 + job.rank)
    target = torch.rand(4, 8, 8)
    seed = np.zeros([6, 8, 8], np.float32)
    seed[3:, 4, 4] = 1.0
    pool = SamplePool(x=np.repeat(seed[None, ...], 16, 0), age=np.zeros(16, np.int64))
    model = DDP(CAModel())
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    scheduler = optim.lr_scheduler.MultiStepLR(optimizer, [10], 0.1)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler)
    loss_log = []
    for i in training.steps(until=16):
        with i:
            batch = pool.sample(4)
            x0 = torch.from_numpy(batch.x)
            loss_rank = loss_f(x0, target).numpy().argsort()[::-1].copy()
            x0 = x0[torch.from_numpy(loss_rank)]
            batch.age = batch.age[loss_rank]
            x0[:1] = torch.from_numpy(seed)
            batch.age[0] = 0
            if len(loss_log) > 5:
                x0[-1:, :, :4, :] *= 0.0
            x = model(x0, steps=np.random.randint(2, 5))
            loss = loss_f(x, target).mean()
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                p.grad /= p.grad.norm() + 1e-8
            optimizer.step()
            scheduler.step()
            batch.x[:] = x.detach().numpy()
            batch.age += 1
            batch.commit()
        loss_log.append(loss.item())
        if len(loss_log) % 5 == 0:
            print("\r step: %d, log10(loss): %.3f" % (len(loss_log), np.log10(loss_log[-1])), end="")
    finish(job, model=model, opt=optimizer, pool=pool.x, age=pool.age, n=len(loss_log))


if __name__ == "__main__":
    main()
