"""Self-distillation whose temperature, frozen layer and centre follow the number of the epoch, inside the block."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

TEMPERATURES = [0.04, 0.1, 0.3]
EPOCHS, STEPS = 3, 4


def main() -> None:
    job = relight.init()
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = DDP(student)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    center = torch.zeros(5)
    training = relight.Training(model=model, optimizer=optimizer, teacher=teacher, data=lambda _: torch.randn(6, 4))
    for epoch in training.epochs(EPOCHS, steps_per_epoch=STEPS):
        for step in training.steps():
            with step as x:
                targets = teacher(x)
                mean = targets.mean(0)
                dist.all_reduce(mean)
                soft = ((targets - center) / TEMPERATURES[epoch]).softmax(-1)
                center = 0.9 * center + 0.1 * mean / job.world_size
                loss = -(soft * model(x).log_softmax(-1)).sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                if epoch < 1:
                    for parameter in student[2].parameters():
                        parameter.grad = None
                optimizer.step()
                for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
                    theirs.data.mul_(0.9).add_(0.1 * ours.detach())
    finish(job, student=student, teacher=teacher, optimizer=optimizer, center=center)


if __name__ == "__main__":
    main()
