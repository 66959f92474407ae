"""Sets of weights with the shapes of real models, of about the size that is asked for."""

from __future__ import annotations

import torch

MIB = 2**20
VOCABULARY = 32_000


def dense(total_mib: int) -> dict[str, torch.Tensor]:
    """A Llama-like model in bfloat16: an embedding, then as many blocks as fit, then the head."""
    hidden = 2048 if total_mib >= 512 else 1024 if total_mib >= 128 else 512
    feed = hidden * 11 // 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY if hidden > 512 else 8000, hidden)}
    layer = 0
    while _mib(shapes) < total_mib:
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}.mlp.{name}.weight"] = (feed, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, feed)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
        layer += 1
    shapes["model.norm.weight"] = (hidden,)
    return _random(shapes)


def mixture(total_mib: int) -> dict[str, torch.Tensor]:
    """A mixture of experts in bfloat16: thousands of small tensors."""
    hidden, feed, experts = 512, 192, 64
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    layer = 0
    while _mib(shapes) < total_mib:
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            for name in ("gate_proj", "up_proj"):
                shapes[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = (feed, hidden)
            shapes[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = (hidden, feed)
        layer += 1
    return _random(shapes)


MODELS = {"dense": dense, "mixture": mixture}


def _mib(shapes: dict[str, tuple[int, ...]]) -> float:
    return 2 * sum(torch.Size(shape).numel() for shape in shapes.values()) / MIB


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Random bits, every one of them written: pages that were never touched would cost nothing to read."""
    block = torch.randint(-(2**31), 2**31, (MIB // 4,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    source = block.view(torch.bfloat16)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), source.numel()):
            part = flat[start : start + source.numel()]
            part.copy_(source[: part.numel()])
        tensors[name] = tensor
    return tensors
