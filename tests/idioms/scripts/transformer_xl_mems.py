"""Memories of earlier segments go from step to step as a tuple."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class XL(nn.Module):
    def __init__(self, vocab=11, dim=8, length=6):
        super().__init__()
        self.length = length
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.MultiheadAttention(dim, 2, batch_first=True) for _ in range(2))
        self.out = nn.Linear(dim, vocab)

    def init_mems(self):
        return [torch.empty(0) for _ in range(len(self.layers) + 1)]

    def forward(self, data, target, *mems):
        if not mems:
            mems = self.init_mems()
        h = self.embed(data)
        hidden = [h]
        for layer, mem in zip(self.layers, mems, strict=False):
            full = torch.cat([mem, h], 1) if mem.numel() else h
            h = h + layer(h, full, full, need_weights=False)[0]
            hidden.append(h)
        with torch.no_grad():
            new = [
                (torch.cat([m, k], 1) if m.numel() else k)[:, -self.length :].detach()
                for m, k in zip(mems, hidden, strict=True)
            ]
        return [F.cross_entropy(self.out(h).flatten(0, 1), target.flatten(), reduction="none"), *new]


def main():
    job = relight.init()
    torch.manual_seed(67)
    para_model = DDP(XL())
    optimizer = torch.optim.Adam(para_model.parameters(), 0.01)
    corpus = torch.randint(0, 11, (2, 200), generator=torch.Generator().manual_seed(job.rank))
    training = relight.Training(model=para_model, optimizer=optimizer)
    mems, train_loss = tuple(), 0.0
    for step in training.steps(until=14):
        with step:
            i = step.number * 5
            data, target = corpus[:, i : i + 5], corpus[:, i + 1 : i + 6]
            para_model.zero_grad()
            ret = para_model(data, target, *mems)
            loss, mems = ret[0], ret[1:]
            loss = loss.float().mean()
            loss.backward()
            train_loss += loss.float().item()
            torch.nn.utils.clip_grad_norm_(para_model.parameters(), 0.25)
            optimizer.step()
            if step.number % 5 == 4:
                cur_loss = train_loss / 5
                train_loss = 0
                if step.number > 9:
                    mems = tuple()
    finish(job, model=para_model, optimizer=optimizer, mems=list(mems), cur=cur_loss, train_loss=train_loss)


if __name__ == "__main__":
    main()
