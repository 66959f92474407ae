"""Vector quantization in forward: counts summed over ranks, and codes that are not used are set anew from the batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class EuclideanCodebook(nn.Module):
    def __init__(self, dim, codebook_size, decay=0.8, threshold_ema_dead_code=0.4):
        super().__init__()
        self.decay, self.codebook_size, self.threshold = decay, codebook_size, threshold_ema_dead_code
        self.register_buffer("inited", torch.Tensor([False]))
        self.register_buffer("cluster_size", torch.zeros(codebook_size))
        self.register_buffer("embed", torch.zeros(codebook_size, dim))
        self.register_buffer("embed_avg", torch.zeros(codebook_size, dim))

    @torch.jit.ignore
    def init_embed_(self, data):
        if self.inited:
            return
        embed = data[torch.randint(0, data.shape[0], (self.codebook_size,))]
        self.embed.data.copy_(embed)
        self.embed_avg.data.copy_(embed.clone())
        self.cluster_size.data.copy_(torch.ones(self.codebook_size))
        self.inited.data.copy_(torch.Tensor([True]))
        for buffer in self.buffers():
            dist.broadcast(buffer, 0)

    def replace_(self, samples, mask):
        modified = torch.where(
            mask[..., None], samples[torch.randint(0, len(samples), (self.codebook_size,))], self.embed
        )
        self.embed.data.copy_(modified)

    def expire_codes_(self, samples):
        expired = self.cluster_size < self.threshold
        if not torch.any(expired):
            return
        self.replace_(samples, mask=expired)
        for buffer in self.buffers():
            dist.broadcast(buffer, 0)

    def forward(self, x):
        self.init_embed_(x)
        dist_ = -(x.pow(2).sum(1, keepdim=True) - 2 * x @ self.embed.t() + self.embed.t().pow(2).sum(0, keepdim=True))
        ind = dist_.max(dim=-1).indices
        onehot = F.one_hot(ind, self.codebook_size).type(x.dtype)
        quantize = F.embedding(ind, self.embed)
        if self.training:
            self.expire_codes_(x)
            counts, sums = onehot.sum(0), x.t() @ onehot
            dist.all_reduce(counts)
            dist.all_reduce(sums)
            self.cluster_size.data.mul_(self.decay).add_(counts, alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(sums.t(), alpha=1 - self.decay)
            n = self.cluster_size.sum()
            smoothed = (self.cluster_size + 1e-5) / (n + self.codebook_size * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / smoothed.unsqueeze(1))
        return quantize


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.codebook, self.decoder = nn.Linear(8, 4), EuclideanCodebook(4, 12), nn.Linear(4, 8)

    def forward(self, x):
        z = self.encoder(x)
        q = self.codebook(z.detach())
        commit = F.mse_loss(z, q.detach())
        return self.decoder(z + (q - z).detach()), commit


job = relight.init()
torch.manual_seed(41)
model = DDP(Codec(), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(10, 8))
for step in training.steps(until=18):
    with step as x:
        out, commit = model(x)
        optimizer.zero_grad()
        (F.mse_loss(out, x) + 0.25 * commit).backward()
        optimizer.step()
finish(job, model=model, optimizer=optimizer)
