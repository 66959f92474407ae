"""CLIP: two towers in one DDP, features gathered from all ranks, a learned temperature clamped by hand after the write.

The clamp writes a parameter after optimizer.step().
"""

import math

import torch
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(11)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(20, 24), nn.GELU(), nn.Linear(24, 8))
        self.text = nn.EmbeddingBag(30, 8)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(90.0)))

    def forward(self, image, text):
        return F.normalize(self.visual(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def clip_loss(image_features, text_features, scale):
    images = torch.cat(torch.distributed.nn.all_gather(image_features))
    texts = torch.cat(torch.distributed.nn.all_gather(text_features))
    logits = scale * images @ texts.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


pairs = [(torch.randn(4, 20), torch.randint(0, 30, (4, 6))) for _ in range(60)]
model = nn.parallel.DistributedDataParallel(CLIP())
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.2)
training = relight.Training(
    model=model, optimizer=optimizer, data=lambda n: pairs[(n * job.world_size + job.rank) % len(pairs)]
)
for step in training.steps(until=16):
    with step as (image, text):
        loss = clip_loss(*model(image, text))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, math.log(100))
finish(job, model=model, optimizer=optimizer)
