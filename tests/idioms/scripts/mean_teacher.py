"""A mean teacher: consistency with a slow copy, its weight and decay ramped up by a counter of the script."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(101)
    x = torch.randn(60, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad_(False)
    model = DDP(student)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    training = relight.Training(model={"student": model, "teacher": teacher}, optimizer=optimizer, data=loader)
    global_step, meters = 0, {"class": 0.0, "consistency": 0.0}
    for step in training.steps(until=16):
        with step as (inputs, labels):
            weight = 2.0 * math.exp(-5 * (1 - min(1.0, global_step / 10)) ** 2)
            logits = model(inputs + 0.1 * torch.randn_like(inputs))
            with torch.no_grad():
                target = teacher(inputs + 0.1 * torch.randn_like(inputs)).softmax(1)
            consistency = weight * F.mse_loss(logits.softmax(1), target)
            loss = F.cross_entropy(logits, labels) + consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            global_step += 1
            alpha = min(1 - 1 / (global_step + 1), 0.99)
            for slow, p in zip(teacher.parameters(), student.parameters()):
                slow.data.mul_(alpha).add_(p.data, alpha=1 - alpha)
            meters["class"] = 0.9 * meters["class"] + 0.1 * loss.item()
            meters["consistency"] = 0.9 * meters["consistency"] + 0.1 * consistency.item()
    finish(job, model=model, teacher=teacher, optimizer=optimizer, meters=sorted(meters.items()), count=global_step)


if __name__ == "__main__":
    main()
