"""Activations go through hooks for saved tensors: on the CPU, and quantized by a scale that the script keeps."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Packer:
    def __init__(self):
        self.scale = 1.0
        self.packed = 0

    def pack(self, tensor):
        self.packed += 1
        if tensor.dtype == torch.float32 and tensor.dim() == 2 and not isinstance(tensor, nn.Parameter):
            self.scale = 0.9 * self.scale + 0.1 * tensor.detach().abs().max().item()
            return ("q", (tensor / self.scale * 127).round().clamp(-127, 127).to(torch.int8), self.scale)
        return ("t", tensor, 0.0)

    def unpack(self, packed):
        kind, tensor, scale = packed
        return tensor if kind == "t" else tensor.float() * scale / 127


def main():
    job = relight.init()
    torch.manual_seed(9)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    packer = Packer()
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack):
                loss = (model(x) - x[:, :4].sin()).square().mean()
            with torch.autograd.graph.save_on_cpu():
                loss = loss + model.module[0].weight.square().sum() * 1e-3
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, scale=packer.scale, packed=packer.packed)


if __name__ == "__main__":
    main()
