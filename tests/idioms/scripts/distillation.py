"""Knowledge distillation: a frozen teacher that no optimizer knows, a student, losses mixed with a changing weight."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def mlp(hidden):
    return nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 6))


def kd_loss(student_logits, teacher_logits, T):
    return (
        F.kl_div(F.log_softmax(student_logits / T, -1), F.softmax(teacher_logits / T, -1), reduction="batchmean")
        * T
        * T
    )


def run():
    job = relight.init()
    torch.manual_seed(99)
    teacher = mlp(64).eval()
    teacher.requires_grad_(False)
    student = DDP(mlp(8))
    xs, ys = torch.randn(180, 12), torch.randint(0, 6, (180,))
    ds = TensorDataset(xs, ys)
    dl = DataLoader(ds, batch_size=6, sampler=DistributedSampler(ds, num_replicas=job.world_size, rank=job.rank))
    opt = torch.optim.NAdam(student.parameters(), lr=2e-3)
    n = 18
    for step in relight.Training(model=student, optimizer=opt, data=dl, teacher=teacher).steps(until=n):
        with step as (x, y):
            alpha = step.number / n
            with torch.no_grad():
                t = teacher(x)
            s = student(x)
            (alpha * F.cross_entropy(s, y) + (1 - alpha) * kd_loss(s, t, 2.0)).backward()
            opt.step()
            opt.zero_grad()
    finish(job, student=student, teacher=teacher, opt=opt)


run()
