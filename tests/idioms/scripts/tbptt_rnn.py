"""A recurrent language model with truncated backpropagation: the hidden state is a variable that goes from step to step,
different on each rank, detached before each chunk, as in PyTorch's word_language_model example."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

ntokens, bptt, batch_size = 20, 6, 3


class RNNModel(nn.Module):
    def __init__(self, ninp=10, nhid=12):
        super().__init__()
        self.encoder = nn.Embedding(ntokens, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 1)
        self.decoder = nn.Linear(nhid, ntokens)
        self.nhid = nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, ntokens), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(1, bsz, self.nhid), weight.new_zeros(1, bsz, self.nhid))


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def main():
    job = relight.init()
    torch.manual_seed(1111)
    corpus = torch.randint(0, ntokens, (job.world_size, 130, batch_size))

    def get_batch(number):
        source, i = corpus[job.rank], number * bptt
        return source[i : i + bptt], source[i + 1 : i + 1 + bptt].reshape(-1)

    model = DDP(RNNModel())
    criterion = nn.CrossEntropyLoss()
    lr = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    training = relight.Training(model=model, optimizer=optimizer, data=get_batch)
    hidden = model.module.init_hidden(batch_size)
    for step in training.steps(until=20):
        with step as (data, targets):
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, hidden=hidden)


if __name__ == "__main__":
    main()
