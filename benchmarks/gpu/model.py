"""A transformer on a device, of any size, and the script of the measured jobs: it runs under `relight run`."""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight

VOCABULARY = 4096
CONTEXT = 512


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.first(x)).view(samples, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return found


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.blocks(self.tokens(tokens)))
        return found


def loss_of(model: nn.Module, samples: int, number: int, device: torch.device) -> torch.Tensor:
    """The loss on a batch that follows from the step's number, computed in bfloat16."""
    generator = torch.Generator(device).manual_seed(number)
    tokens = torch.randint(VOCABULARY, (samples, CONTEXT + 1), generator=generator, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--told", type=Path, required=True, help="where rank 0 writes how large the model is")
    options = parser.parse_args()
    job = relight.init()
    torch.use_deterministic_algorithms(True)  # of attention and embeddings: else no step can be repeated
    torch.manual_seed(0)
    net = Transformer(options.layers, options.width).to(job.device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=options.steps):
        with step:
            loss = loss_of(model, options.samples, step.number * job.world_size + job.rank, job.device)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if job.rank == 0:
        count = sum(parameter.numel() for parameter in net.parameters())
        options.told.write_text(json.dumps({"parameters": count, "state_bytes": 12 * count}))


if __name__ == "__main__":
    main()
