"""pytorch/examples' word language model: a hidden state that is repackaged, SGD by hand, lr /= 4, total_loss by interval."""

# ranks: 2
import math
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.2):
        super().__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nlayers, self.nhid = nlayers, nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return torch.log_softmax(self.decoder(self.drop(output)).view(-1, self.ntoken), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


job = relight.init()
torch.manual_seed(1111)
bptt, batch_size, clip, log_interval, epochs, ntokens = 5, 4, 0.25, 4, 3, 20
corpus = torch.randint(ntokens, (400,))
train_data = batchify(corpus[job.rank * 160 : job.rank * 160 + 160], batch_size)
val_data = batchify(corpus[320:], batch_size)
net = RNNModel(ntokens, 12, 12, 2)
model = DDP(net)
criterion = nn.NLLLoss()
lr, best_val_loss, total_loss, hidden = 2.0, None, 0.0, None


def evaluate(data_source):
    net.eval()
    total = 0.0
    h = net.init_hidden(batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, h = net(data, h)
            h = repackage_hidden(h)
            total += len(data) * criterion(output, targets).item()
    net.train()
    return total / (len(data_source) - 1)


starts = range(0, train_data.size(0) - 1, bptt)
training = relight.Training(model=model)
start_time = time.time()
for step in training.steps(until=epochs * len(starts)):
    with step:
        epoch, batch = divmod(step.number, len(starts))
        if batch == 0:
            if epoch:
                val_loss = evaluate(val_data)
                if not best_val_loss or val_loss < best_val_loss:
                    best_val_loss = val_loss
                else:
                    lr /= 4.0  # no improvement on the validation set
            total_loss = 0.0
            hidden = net.init_hidden(batch_size)
        data, targets = get_batch(train_data, starts[batch])
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % log_interval == 0 and batch > 0:
            cur_loss = total_loss / log_interval
            elapsed = time.time() - start_time
            print(f"| epoch {epoch:3d} | ms/batch {elapsed * 1000 / log_interval:5.2f} | ppl {math.exp(cur_loss):8.2f}")
            total_loss = 0
            start_time = time.time()
finish(job, model=net, lr=lr, best=best_val_loss, total_loss=total_loss, hidden=hidden)
