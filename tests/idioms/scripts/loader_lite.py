"""A loader of the script's own that keeps its place: next_batch() walks through shards of tokens, rank by rank."""

# ranks: 2
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def load_tokens(shard):
    return torch.randint(0, 23, (150,), generator=torch.Generator().manual_seed(100 + shard))


class DataLoaderLite:
    def __init__(self, B, T, process_rank, num_processes, split):
        self.B, self.T, self.process_rank, self.num_processes = B, T, process_rank, num_processes
        assert split in {"train", "val"}
        self.shards = [0, 1, 2] if split == "train" else [9]
        self.reset()

    def reset(self):
        self.current_shard = 0
        self.tokens = load_tokens(self.shards[self.current_shard])
        self.current_position = self.B * self.T * self.process_rank

    def next_batch(self):
        B, T = self.B, self.T
        buf = self.tokens[self.current_position : self.current_position + B * T + 1]
        x, y = buf[:-1].view(B, T), buf[1:].view(B, T)
        self.current_position += B * T * self.num_processes
        if self.current_position + (B * T * self.num_processes + 1) > len(self.tokens):
            self.current_shard = (self.current_shard + 1) % len(self.shards)
            self.tokens = load_tokens(self.shards[self.current_shard])
            self.current_position = B * T * self.process_rank
        return x, y


def main():
    job = relight.init()
    torch.manual_seed(1337)
    model = DDP(nn.Sequential(nn.Embedding(23, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 23)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), eps=1e-8)
    train_loader = DataLoaderLite(3, 8, job.rank, job.world_size, "train")
    val_loader = DataLoaderLite(3, 8, job.rank, job.world_size, "val")
    training = relight.Training(model=model, optimizer=optimizer)
    grad_accum_steps = 2
    for step in training.steps(until=15):
        with step:
            if step.number % 5 == 0:
                model.eval()
                val_loader.reset()
                with torch.no_grad():
                    x, y = val_loader.next_batch()
                    val_loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                torch.distributed.all_reduce(val_loss)
            model.train()
            optimizer.zero_grad()
            loss_accum = 0.0
            for micro_step in range(grad_accum_steps):
                x, y = train_loader.next_batch()
                model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / grad_accum_steps
                loss_accum += loss.detach()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, position=train_loader.current_position, val=val_loss)


if __name__ == "__main__":
    main()
