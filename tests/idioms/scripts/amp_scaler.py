"""Mixed precision: GradScaler with overflow steps provoked, GradScaler state handed over, clip by a deque of past norms (AutoClip)."""

# ranks: 2
import statistics
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(9)
    net = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1)))
    opt = torch.optim.AdamW(net.parameters(), 0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=5)
    cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cos], [5])
    training = relight.Training(
        model=net, optimizer=opt, scheduler=sched, scaler=scaler, data=lambda n: torch.randn(6, 6)
    )
    norms = deque(maxlen=5)
    skipped = 0
    for step in training.steps(until=16):
        with step as x:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(net(x), x.sum(1, keepdim=True))
            scaler.scale(loss).backward()
            if step.number in (4, 9):
                for p in net.parameters():
                    p.grad.fill_(float("inf"))
            scaler.unscale_(opt)
            clip = statistics.median(norms) if norms else 1.0
            norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
            if torch.isfinite(norm):
                norms.append(norm.item())
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            if scaler.get_scale() < before:
                skipped += 1
            else:
                sched.step()
            opt.zero_grad(set_to_none=True)
    finish(job, net=net, opt=opt, scaler=scaler, sched=sched, norms=norms, skipped=skipped)


if __name__ == "__main__":
    main()
