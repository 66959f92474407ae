"""Complex, double and bfloat16 parameters, an integer parameter without gradient, an empty buffer."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.double))
        self.head = nn.Linear(8, 2, dtype=torch.bfloat16)
        self.codes = nn.Parameter(torch.randint(0, 7, (4,)), requires_grad=False)
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("hits", torch.zeros(4, dtype=torch.int64), persistent=False)

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * self.weight * self.scale.float()
        back = torch.fft.irfft(spectrum, n=8)
        self.hits += torch.bincount(self.codes % 4, minlength=4)
        return self.head(back.bfloat16()).float()


def main():
    job = relight.init()
    torch.manual_seed(73)
    model = Spectral()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.02, foreach=False)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 8))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            for p in model.parameters():
                if p.grad is not None:
                    flat = torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad
                    dist.all_reduce(flat)
                    flat /= job.world_size
            with torch.no_grad():
                model.codes += 1
            optimizer.step()
    state = {k: v for k, v in model.state_dict().items()}
    finish(
        job,
        hits=model.hits,
        optimizer=optimizer,
        **{k.replace(".", "_"): torch.view_as_real(v) if v.is_complex() else v for k, v in state.items()},
    )


if __name__ == "__main__":
    main()
