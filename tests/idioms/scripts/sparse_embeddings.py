"""Sparse embeddings (word2vec with negative sampling): SparseAdam for the embeddings whose gradients are gathered by hand,
Adam under DDP for the rest. Two optimizers, two writes."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

VOCAB, DIM = 30, 8


def sync_sparse(embedding):
    """Average a sparse gradient: as a dense one, made sparse again."""
    dense = embedding.weight.grad.to_dense()
    dist.all_reduce(dense)
    embedding.weight.grad = (dense / dist.get_world_size()).to_sparse(1)


def main():
    job = relight.init()
    torch.manual_seed(47)
    embeddings = nn.Embedding(VOCAB, DIM, sparse=True)
    projection = DDP(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)))
    sparse_opt = torch.optim.SparseAdam(embeddings.parameters(), lr=1e-2)
    dense_opt = torch.optim.Adam(projection.parameters(), lr=1e-2, foreach=True)
    training = relight.Training(
        model={"embeddings": embeddings, "projection": projection},
        optimizer={"sparse": sparse_opt, "dense": dense_opt},
        data=lambda n: (torch.randint(0, VOCAB, (6,)), torch.randint(0, VOCAB, (6,)), torch.randint(0, VOCAB, (6, 4))),
    )
    for step in training.steps(until=16):
        with step as (center, context, negative):
            u = projection(embeddings(center))
            positive = F.logsigmoid((u * embeddings(context)).sum(1))
            negatives = F.logsigmoid(-(embeddings(negative) @ u.unsqueeze(2)).squeeze(2)).sum(1)
            sparse_opt.zero_grad()
            dense_opt.zero_grad()
            (-(positive + negatives).mean()).backward()
            sync_sparse(embeddings)
            sparse_opt.step()
            dense_opt.step()
    finish(job, embeddings=embeddings, projection=projection, sparse=sparse_opt, dense=dense_opt)


if __name__ == "__main__":
    main()
