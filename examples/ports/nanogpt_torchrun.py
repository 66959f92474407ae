"""A port of nanoGPT's train.py, written afresh and small, for torchrun. nanogpt_relight.py is its port.

torchrun --nproc-per-node 2 examples/ports/nanogpt_torchrun.py
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    options = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1337 + rank)  # each rank draws batches of its own

    model = DDP(GPT(options).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=options.dtype == "float16")
    autocast = torch.autocast(device.type, getattr(torch, options.dtype), enabled=options.dtype != "float32")
    text = read_text()
    train_text, val_text = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    first = 0
    if options.out_dir and (Path(options.out_dir) / "ckpt.pt").exists():
        checkpoint = torch.load(Path(options.out_dir) / "ckpt.pt", map_location=device)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        first = checkpoint["iter_num"]

    for iter_num in range(first, options.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iter_num, options)
        for micro_step in range(options.gradient_accumulation_steps):
            model.require_backward_grad_sync = micro_step == options.gradient_accumulation_steps - 1
            x, y = get_batch(train_text, options, device)
            with autocast:
                loss = loss_of(model, x, y) / options.gradient_accumulation_steps
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and (iter_num + 1) % options.eval_interval == 0:
            val_loss = estimate_loss(model.module, val_text, options, device)
            print(f"step {iter_num + 1}: val loss {val_loss:.4f}", flush=True)
            if options.out_dir:
                Path(options.out_dir).mkdir(parents=True, exist_ok=True)
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"scaler": scaler.state_dict(), "iter_num": iter_num + 1}
                torch.save(state, Path(options.out_dir) / "ckpt.pt")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--max_iters", type=int, default=200)
    add("--eval_interval", type=int, default=50)
    add("--gradient_accumulation_steps", type=int, default=2)
    add("--batch_size", type=int, default=4)
    add("--block_size", type=int, default=64)
    add("--n_layer", type=int, default=2)
    add("--n_head", type=int, default=4)
    add("--n_embd", type=int, default=64)
    add("--dropout", type=float, default=0.1)
    add("--learning_rate", type=float, default=1e-3)
    add("--warmup_iters", type=int, default=10)
    add("--grad_clip", type=float, default=1.0)
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    add("--out_dir", default="", help="of checkpoints; none without it")
    return parser.parse_args()


# --- data ---------------------------------------------------------------------------------------------------------
def read_text() -> Tensor:
    """Some of Python's own source: every machine has it."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths[:40])), dtype=torch.uint8)


def get_batch(text: Tensor, options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same moved on by one."""
    starts = torch.randint(len(text) - options.block_size - 1, (options.batch_size,)).tolist()
    pieces = torch.stack([text[start : start + options.block_size + 1] for start in starts]).long().to(device)
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def estimate_loss(model: nn.Module, text: Tensor, options: argparse.Namespace, device: torch.device) -> float:
    """Mean over a few batches."""
    model.eval()
    losses = [float(loss_of(model, *get_batch(text, options, device))) for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


def learning_rate(iter_num: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    highest: float = options.learning_rate
    warmup: int = options.warmup_iters
    if iter_num < warmup:
        return highest * (iter_num + 1) / (warmup + 1)
    done = (iter_num - warmup) / max(1, int(options.max_iters) - warmup)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


# --- model --------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.n_embd
        self.heads = options.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.c_proj(y))
        out: Tensor = x + self.dropout(self.mlp(self.ln_2(x)))
        return out


class GPT(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, options.n_embd), nn.Embedding(options.block_size, options.n_embd)
        self.h = nn.Sequential(*[Block(options) for _ in range(options.n_layer)])
        self.ln_f = nn.LayerNorm(options.n_embd)
        self.lm_head = nn.Linear(options.n_embd, 256, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.lm_head(self.ln_f(self.h(x)))
        return logits


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


if __name__ == "__main__":
    main()
