"""VQ-VAE whose codebook moves by averages of cluster sizes over all ranks, in forward; the loss knows nothing of it.

Buffers that are equal on all ranks change by collectives before the write; dead codes are drawn anew.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import relight
from tests.idioms.digest import finish


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num_embeddings=12, embedding_dim=4, decay=0.9, epsilon=1e-5):
        super().__init__()
        self.n, self.dim, self.decay, self.eps = num_embeddings, embedding_dim, decay, epsilon
        embed = torch.randn(num_embeddings, embedding_dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(num_embeddings))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z):
        dist_ = torch.cdist(z, self.embed)
        idx = dist_.argmin(1)
        onehot = F.one_hot(idx, self.n).type(z.dtype)
        quantize = F.embedding(idx, self.embed)
        if self.training:
            with torch.no_grad():
                onehot_sum, embed_sum = onehot.sum(0), onehot.T @ z
                dist.all_reduce(onehot_sum)
                dist.all_reduce(embed_sum)
                self.cluster_size.data.mul_(self.decay).add_(onehot_sum, alpha=1 - self.decay)
                self.embed_avg.data.mul_(self.decay).add_(embed_sum, alpha=1 - self.decay)
                n = self.cluster_size.sum()
                size = (self.cluster_size + self.eps) / (n + self.n * self.eps) * n
                self.embed.data.copy_(self.embed_avg / size.unsqueeze(1))
        loss = 0.25 * F.mse_loss(quantize.detach(), z)
        return z + (quantize - z).detach(), loss


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(10, 4), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 10))
        self.vq = VectorQuantizerEMA()

    def forward(self, x):
        q, vq_loss = self.vq(self.encoder(x))
        return self.decoder(q), vq_loss


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(17)
    model = nn.parallel.DistributedDataParallel(VQVAE(), broadcast_buffers=False)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, amsgrad=True)
    training = relight.Training(model=model, optimizer=opt, data=lambda n: torch.randn(12, 10))
    for step in training.steps(until=18):
        with step as x:
            recon, vq_loss = model(x)
            (F.mse_loss(recon, x) + vq_loss).backward()
            opt.step()
            opt.zero_grad()
    finish(job, model=model, opt=opt)
