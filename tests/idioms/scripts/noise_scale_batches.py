"""An estimate of the gradient's noise scale decides how many microbatches the next step takes; a spike in a logging handler skips."""

# ranks: 2
import logging
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

logger = logging.getLogger("train")
logger.setLevel(logging.INFO)
logger.propagate = False


class SpikeHandler(logging.Handler):
    """Keeps records in memory, and raises a flag when a loss is far from the last ones."""

    def __init__(self, size=6):
        super().__init__()
        self.records, self.flag, self.total = deque(maxlen=size), False, 0

    def emit(self, record):
        value = record.args[0]
        self.total += 1
        if len(self.records) > 2:
            mean = sum(self.records) / len(self.records)
            self.flag = value > 1.3 * mean
        self.records.append(value)


class EMA:
    def __init__(self, alpha):
        self.alpha, self.value, self.n = alpha, 0.0, 0

    def __iadd__(self, x):
        self.n += 1
        self.value = self.alpha * self.value + (1 - self.alpha) * x
        return self

    def __float__(self):
        return self.value / (1 - self.alpha**self.n) if self.n else 0.0


class NoiseScale:
    def __init__(self):
        self.s, self.g2 = EMA(0.8), EMA(0.8)

    def update(self, small, big, b_small, b_big):
        self.g2 += (b_big * big - b_small * small) / (b_big - b_small)
        self.s += (small - big) / (1 / b_small - 1 / b_big)

    def __call__(self):
        g2 = float(self.g2)
        return float(self.s) / g2 if g2 > 0 else 1.0


def norm2(params):
    return sum(p.grad.square().sum().item() for p in params)


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(26)
    handler = SpikeHandler()
    logger.addHandler(handler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=0.01)
    scale, micro, skipped = NoiseScale(), 2, 0
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(32, 6))
    for step in training.steps(until=17):
        with step as x:
            optimizer.zero_grad()
            chunks = x[: 4 * micro].split(4)
            local = 0.0
            for i, chunk in enumerate(chunks):
                if i < len(chunks) - 1:
                    with model.no_sync():
                        loss = (model(chunk) - chunk.sum(1, keepdim=True).sin()).square().mean() / len(chunks)
                        loss.backward()
                        if i == 0:
                            local = norm2(params) * len(chunks) ** 2
                else:
                    loss = (model(chunk) - chunk.sum(1, keepdim=True).sin()).square().mean() / len(chunks)
                    loss.backward()
            pair = torch.tensor([local, loss.item() * len(chunks)])
            dist.all_reduce(pair)
            pair /= job.world_size
            scale.update(pair[0].item(), norm2(params), 4, 4 * micro * job.world_size)
            logger.info("loss %.4f", pair[1].item())
            if handler.flag:
                skipped += 1
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8
            else:
                optimizer.step()
            micro = max(2, min(8, int(scale() / 4) + 1))
    finish(
        job,
        model=model,
        opt=optimizer,
        micro=micro,
        s=scale.s.value,
        g2=scale.g2.value,
        skipped=skipped,
        records=list(handler.records),
        total=handler.total,
    )
