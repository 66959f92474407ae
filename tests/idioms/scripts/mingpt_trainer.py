"""minGPT's trainer: callbacks by event, a sampler with replacement, an endless number of samples, iter() and next()."""

# ranks: 2
import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.sampler import RandomSampler

import relight
from tests.idioms.digest import finish


class CfgNode:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)

    def merge_from_dict(self, d):
        self.__dict__.update(d)


class SortDataset(Dataset):
    def __init__(self, split, length=6, num_digits=3):
        self.split, self.length, self.num_digits = split, length, num_digits

    def __len__(self):
        return 10000

    def __getitem__(self, idx):
        inp = torch.randint(self.num_digits, size=(self.length,), dtype=torch.long)
        if torch.rand(1).item() < 0.5 and inp.unique().nelement() > self.length // 2:
            inp = inp.flip(0)
        sol = torch.sort(inp)[0]
        cat = torch.cat((inp, sol), dim=0)
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(0.1)
        self.attn = nn.MultiheadAttention(config.n_embd, 2, batch_first=True)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def configure_optimizers(self, config):
        decay = {pn for pn, p in self.named_parameters() if p.dim() >= 2}
        params = dict(self.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [params[pn] for pn in sorted(decay)], "weight_decay": config.weight_decay},
                {"params": [params[pn] for pn in sorted(params.keys() - decay)], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
        )

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        mask = torch.triu(torch.ones(idx.size(1), idx.size(1), dtype=torch.bool), 1)
        x = x + self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.raw_model, self.train_dataset = config, model, train_dataset
        self.optimizer = None
        self.callbacks = defaultdict(list)
        self.iter_num, self.iter_time, self.iter_dt = 0, 0.0, 0.0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        config = self.config
        self.model = model = DDP(self.raw_model)
        self.optimizer = self.raw_model.configure_optimizers(config)
        train_loader = DataLoader(
            self.train_dataset,
            sampler=RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10)),
            shuffle=False,
            batch_size=config.batch_size,
        )
        training = relight.Training(model=model, optimizer=self.optimizer, data=train_loader)
        model.train()
        self.iter_time = time.time()
        for step in training.steps(until=config.max_iters):
            with step as (x, y):
                _, self.loss = model(x, y)
                model.zero_grad(set_to_none=True)
                self.loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
                self.optimizer.step()
                self.trigger_callbacks("on_batch_end")
                self.iter_num += 1
                tnow = time.time()
                self.iter_dt = tnow - self.iter_time
                self.iter_time = tnow


job = relight.init()
torch.manual_seed(3407)
config = CfgNode(vocab_size=3, block_size=11, n_embd=16, batch_size=8, learning_rate=5e-4, betas=(0.9, 0.95))
config.merge_from_dict({"weight_decay": 0.1, "grad_norm_clip": 1.0, "max_iters": 24})
trainer = Trainer(config, GPT(config), SortDataset("train"))


def batch_end_callback(trainer):
    if trainer.iter_num % 10 == 0:
        print(f"iter_dt {trainer.iter_dt * 1000:.2f}ms; iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")


trainer.add_callback("on_batch_end", batch_end_callback)
trainer.run()
finish(job, model=trainer.raw_model, optimizer=trainer.optimizer, iter_num=trainer.iter_num, loss=trainer.loss)
