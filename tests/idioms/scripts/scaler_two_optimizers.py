"""One grad scaler, two optimizers; gradients that overflow now and then, and the scale that follows."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(70)
    encoder, head = DDP(nn.Linear(6, 8)), DDP(nn.Linear(8, 2))
    opt_e = torch.optim.Adam(encoder.parameters(), 1e-2)
    opt_h = torch.optim.SGD(head.parameters(), 1e-1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    skipped = 0
    training = relight.Training(
        model={"encoder": encoder, "head": head},
        optimizer={"encoder": opt_e, "head": opt_h},
        scaler=scaler,
        data=lambda n: torch.randn(6, 6),
    )
    for step in training.steps(until=16):
        with step as x:
            opt_e.zero_grad()
            opt_h.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(head(encoder(x)).float(), (x[:, 0] > 0).long())
                if step.number in (4, 9):
                    loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(opt_e)
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(opt_e)
            scaler.step(opt_h)
            scaler.update()
            skipped += scaler.get_scale() < before
    finish(job, encoder=encoder, head=head, oe=opt_e, oh=opt_h, scaler=scaler, skipped=skipped)


if __name__ == "__main__":
    main()
