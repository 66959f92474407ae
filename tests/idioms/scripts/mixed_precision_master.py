"""bfloat16 weights with float32 masters in a list, stochastic rounding, and a loss scale by hand."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def stochastic(master, generator):
    bits = master.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).bfloat16()


def main():
    job = relight.init()
    torch.manual_seed(47)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    model = DDP(net)
    masters = [p.detach().float().clone().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.Adam(masters, 0.01)
    holder = nn.ParameterList(masters)
    optimizer = torch.optim.Adam(holder.parameters(), 0.01)
    generator = torch.Generator().manual_seed(3)
    scale, good = 256.0, 0
    training = relight.Training(
        model={"net": model, "masters": holder}, optimizer=optimizer, data=lambda n: torch.randn(6, 6)
    )
    for step in training.steps(until=14):
        with step as x:
            net.zero_grad()
            loss = F.cross_entropy(model(x.bfloat16()).float(), x[:, :3].argmax(1))
            (loss * scale).backward()
            finite = all(torch.isfinite(p.grad).all() for p in net.parameters()) and step.number != 6
            if finite:
                for m, p in zip(holder, net.parameters(), strict=True):
                    m.grad = p.grad.float() / scale
                optimizer.step()
                with torch.no_grad():
                    for m, p in zip(holder, net.parameters(), strict=True):
                        p.copy_(stochastic(m, generator))
                good += 1
                if good == 4:
                    scale, good = scale * 2, 0
            else:
                scale, good = scale / 2, 0
    finish(job, net=net, optimizer=optimizer, scale=scale, good=good, generator=generator)


if __name__ == "__main__":
    main()
