"""AWD-LSTM: raw weights whose dropped copies are set as attributes in forward, variational dropout by random sequence lengths, a
hidden state that is repackaged, averages swapped in for evaluation by p.data, a non-monotone trigger from a list of losses."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class WeightDrop(nn.Module):
    def __init__(self, module, weights, dropout=0.0):
        super().__init__()
        self.module, self.weights, self.dropout = module, weights, dropout
        for name_w in self.weights:
            w = getattr(self.module, name_w)
            del self.module._parameters[name_w]
            self.module.register_parameter(name_w + "_raw", nn.Parameter(w.data))

    def forward(self, x, h):
        for name_w in self.weights:
            raw_w = getattr(self.module, name_w + "_raw")
            w = F.dropout(raw_w, p=self.dropout, training=self.training)
            setattr(self.module, name_w, w.clone())
        return self.module(x, h)


class Cell(nn.Module):
    def __init__(self, nin, nhid):
        super().__init__()
        self.wx, self.wh = nn.Linear(nin, 4 * nhid), nn.Linear(nhid, 4 * nhid)
        self.weight_hh = nn.Parameter(self.wh.weight.data.clone())
        del self.wh

    def forward(self, x, hc):
        outs, (h, c) = [], hc
        for t in range(x.size(0)):
            i, f, g, o = (self.wx(x[t]) + F.linear(h, self.weight_hh)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        return torch.stack(outs), (h, c)


class RNNModel(nn.Module):
    def __init__(self, ntoken=20, ninp=8, nhid=10):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(ntoken, ninp), WeightDrop(Cell(ninp, nhid), ["weight_hh"], 0.3)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(out).flatten(0, 1), hidden, out

    def init_hidden(self, bsz):
        weight = next(self.parameters()).data
        return weight.new_zeros(bsz, 10), weight.new_zeros(bsz, 10)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def evaluate():
    net.eval()
    with torch.no_grad():
        out, _, _ = net(valid[:-1], net.init_hidden(valid.size(1)))
        loss = F.cross_entropy(out, valid[1:].flatten()).item()
    net.train()
    return loss


def train(step):
    global hidden, i
    rng = np.random.RandomState(step.number)
    bptt = 5 if rng.random_sample() < 0.95 else 3
    seq_len = max(3, int(rng.normal(bptt, 1)))
    seq_len = min(seq_len, 8)
    lr2 = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = lr2 * seq_len / 5
    if i + seq_len + 1 >= len(corpus):
        i, hidden = 0, net.init_hidden(4)
    hidden = repackage_hidden(hidden)
    optimizer.zero_grad()
    output, hidden, rnn_h = model(corpus[i : i + seq_len], hidden)
    loss = F.cross_entropy(output, corpus[i + 1 : i + 1 + seq_len].flatten())
    loss = loss + 2 * rnn_h.pow(2).mean() + (rnn_h[1:] - rnn_h[:-1]).pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 0.25)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = lr2
    i += seq_len
    return loss.item()


job = relight.init()
torch.manual_seed(11)
corpus, valid = (
    torch.randint(0, 20, (60, 4 * job.world_size))[:, job.rank * 4 : job.rank * 4 + 4],
    torch.randint(0, 20, (9, 4)),
)
net = RNNModel()
model = DDP(net)
params = list(net.parameters())
optimizer = optim.ASGD(params, lr=1.0, t0=0, lambd=0.0, weight_decay=1e-6)
training = relight.Training(model=model, optimizer=optimizer)
best_val_loss, stored_loss, hidden, i = [], 100000000, net.init_hidden(4), 0
for step in training.steps(until=18):
    with step:
        loss = train(step)
    if step.number % 3 == 2:
        tmp = {}
        for prm in net.parameters():
            tmp[prm] = prm.data.clone()
            if "ax" in optimizer.state[prm]:
                prm.data = optimizer.state[prm]["ax"].clone()
        val_loss2 = evaluate()
        if val_loss2 < stored_loss:
            stored_loss = val_loss2
        for prm in net.parameters():
            prm.data = tmp[prm].clone()
        if len(best_val_loss) > 2 and val_loss2 > min(best_val_loss[:-2]):
            print("Dividing learning rate by 10")
            optimizer.param_groups[0]["lr"] /= 10.0
        best_val_loss.append(val_loss2)
finish(job, model=model, opt=optimizer, hidden=hidden, i=i, best=best_val_loss, stored=stored_loss)
