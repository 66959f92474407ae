"""Everything in float64 by the default dtype, complex parameters, and a spectral layer."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

torch.set_default_dtype(torch.float64)


class SpectralConv(nn.Module):
    def __init__(self, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.rand(4, 4, modes, dtype=torch.cfloat) / 16)

    def forward(self, x):
        ft = torch.fft.rfft(x)
        out = torch.zeros_like(ft)
        out[..., : self.modes] = torch.einsum("bim,iom->bom", ft[..., : self.modes], self.weight.to(ft.dtype))
        return torch.fft.irfft(out, n=x.size(-1))


class Fno(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.spectral, self.skip = nn.Conv1d(1, 4, 1), SpectralConv(4), nn.Conv1d(4, 4, 1)
        self.out = nn.Conv1d(4, 1, 1)

    def forward(self, x):
        h = self.lift(x)
        return self.out(torch.nn.functional.gelu(self.spectral(h) + self.skip(h)))


def main():
    job = relight.init()
    torch.manual_seed(102)
    model = DDP(Fno())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    training = relight.Training(
        model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(4, 1, 16).cumsum(-1)
    )
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            y = model(x)
            (torch.norm(y - x.flip(-1), dim=-1) / torch.norm(x, dim=-1)).mean().backward()
            optimizer.step()
            scheduler.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
