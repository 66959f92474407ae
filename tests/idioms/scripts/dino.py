"""DINO: student and teacher, multi-crop, a center that is all-reduced inside the loss module after the losses are known, a
teacher moved by a momentum schedule after the update, gradients of the last layer cancelled at first."""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import relight
from tests.idioms.digest import finish


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops, center_momentum=0.9):
        super().__init__()
        self.center_momentum, self.ncrops = center_momentum, ncrops
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output, epoch):
        student_out = (student_output / 0.1).chunk(self.ncrops)
        temp = 0.04 + 0.03 * min(1.0, epoch / 10)
        teacher_out = F.softmax((teacher_output - self.center) / temp, dim=-1).detach().chunk(2)
        total, n = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v != iq:
                    total = total + torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                    n += 1
        self.update_center(teacher_output)
        return total / n

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


def cancel_gradients_last_layer(step, model, freeze):
    if step < freeze:
        for n, p in model.named_parameters():
            if "last_layer" in n:
                p.grad = None


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last_layer = nn.Sequential(nn.Linear(10, 16), nn.GELU()), nn.Linear(16, 6, bias=False)

    def forward(self, x):
        return self.last_layer(self.body(x))


def train_dino():
    job = relight.init()
    torch.manual_seed(58)
    student, teacher = Head(), Head()
    teacher.load_state_dict(student.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    student = nn.parallel.DistributedDataParallel(student)
    dino_loss = DINOLoss(6, ncrops=4)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    n = 16
    momentum_schedule = [1 - 0.1 * (math.cos(math.pi * i / n) + 1) / 2 for i in range(n)]
    training = relight.Training(
        model={"student": student, "teacher": teacher, "loss": dino_loss},
        optimizer=optimizer,
        data=lambda i: [c + 0.2 * torch.randn(5, 10) for c in [torch.randn(5, 10)] * 4],
    )
    for step in training.steps(until=n):
        with step as crops:
            teacher_output = teacher(torch.cat(crops[:2]))
            student_output = student(torch.cat(crops))
            loss = dino_loss(student_output, teacher_output, step.number)
            optimizer.zero_grad()
            loss.backward()
            cancel_gradients_last_layer(step.number, student, freeze=3)
            optimizer.step()
            with torch.no_grad():
                m = momentum_schedule[step.number]
                for param_q, param_k in zip(student.module.parameters(), teacher.parameters()):
                    param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
    finish(job, student=student, teacher=teacher, loss=dino_loss, optimizer=optimizer)


if __name__ == "__main__":
    train_dino()
