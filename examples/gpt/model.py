"""The byte-level GPT: what it is, and how it writes. Training and serving share this file."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes that must be the same wherever the model's weights are to fit."""
    add = parser.add_argument
    add("--context", type=int, default=128, help="bytes of text in a sequence")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--width", type=int, default=192, help="size of the vector for each byte")
    add("--heads", type=int, default=6, help="attention heads; must divide --width")
    add("--dropout", type=float, default=0.1, help="share of activations dropped in training")


class Block(nn.Module):
    """Attention to what came before, then a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.before_network = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attended(mixed.transpose(1, 2).flatten(2)))
        thought: Tensor = self.network(self.before_network(x))
        return x.add(self.dropout(thought))


class GPT(nn.Module):
    """Predicts each next byte. Embedding and output share one matrix."""

    def __init__(self, options: argparse.Namespace) -> None:
        """`options`: what `add_model_arguments` asks for."""
        super().__init__()
        self.context: int = options.context
        self.embedding = nn.Embedding(BYTES, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.dropout = nn.Dropout(options.dropout)
        blocks = [Block(options.width, options.heads, options.dropout) for _ in range(options.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.last_norm = nn.LayerNorm(options.width)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.embedding(tokens) + self.positions(places))
        return F.linear(self.last_norm(self.blocks(x)), self.embedding.weight)


@torch.no_grad()
def write_on(model: GPT, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
    """The bytes that the model, which must be in `eval` mode, puts after `prompt`. Temperature 0: always the likeliest.

    Below 1, likely bytes become likelier still.
    """
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(tokens[:, -model.context :])[:, -1]
        if temperature:
            likely = (logits / temperature).softmax(dim=-1)
            chosen = torch.multinomial(likely, 1, generator=generator)
        else:
            chosen = logits.argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, chosen], dim=1)
    return bytes(tokens[0, len(prompt) :].tolist())
