"""Masked language modelling with a trainer class that holds everything as attributes, and draws its masks itself."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import relight
from tests.idioms.digest import finish

MASK, IGNORE = 1, -100


class Encoder(nn.Module):
    def __init__(self, vocab=40, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.out(self.layers(self.embed(tokens)))


class Trainer:
    def __init__(self, job, steps=18):
        self.job = job
        self.steps = steps
        torch.manual_seed(7)
        corpus = torch.randint(2, 40, (120, 10))
        self.model = DistributedDataParallel(Encoder())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=4e-3, total_steps=steps)
        self.loader = DataLoader(
            corpus, batch_size=6, sampler=DistributedSampler(corpus, job.world_size, job.rank, seed=3), drop_last=True
        )
        self.loss_fn = nn.CrossEntropyLoss(ignore_index=IGNORE)

    def mask(self, tokens):
        labels = tokens.clone()
        chosen = torch.rand(tokens.shape) < 0.15
        chosen[:, 0] = True
        labels[~chosen] = IGNORE
        inputs = tokens.clone()
        inputs[chosen & (torch.rand(tokens.shape) < 0.8)] = MASK
        return inputs, labels

    def train_step(self, tokens):
        inputs, labels = self.mask(tokens)
        logits = self.model(inputs)
        loss = self.loss_fn(logits.view(-1, logits.size(-1)), labels.view(-1))
        loss.backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def fit(self):
        training = relight.Training(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.loader
        )
        for step in training.steps(until=self.steps):
            with step as tokens:
                loss = self.train_step(tokens)
            if step.committed and self.job.rank == 0 and step.number % 6 == 0:
                print(f"step {step.number} loss {loss:.3f}")


if __name__ == "__main__":
    trainer = Trainer(relight.init())
    trainer.fit()
    finish(trainer.job, model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler)
