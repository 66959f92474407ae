"""MoCo: a key encoder moved by momentum in forward, before the optimizer writes, and a queue of keys of all ranks.

The key encoder, the queue and its pointer change before the write: they must be undone when the step is repeated.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import relight
from tests.idioms.digest import finish


def encoder(dim):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, dim))


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor, async_op=False)
    return torch.cat(gathered, dim=0)


class MoCo(nn.Module):
    def __init__(self, dim=8, K=48, m=0.9, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(dim), encoder(dim)
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(len(q), dtype=torch.long)


def main():
    job = relight.init()
    torch.manual_seed(3)
    images = torch.randn(60, 3, 4, 4)

    def two_crops(i):
        x = images[torch.randint(0, 60, (4,))]
        return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)

    model = MoCo()
    model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    training = relight.Training(model=model, optimizer=optimizer, data=two_crops)
    for step in training.steps(until=20):
        with step as (im_q, im_k):
            output, target = model(im_q, im_k)
            loss = F.cross_entropy(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
