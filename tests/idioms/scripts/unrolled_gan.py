"""An unrolled GAN: the discriminator is copied by deepcopy in the step, trained a few batches further, and loaded back after
the generator's update; statistics of the data in a class, a meter printed after the step."""

# ranks: 2
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.map1, self.map2 = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.map2(torch.tanh(self.map1(x)))


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.map1, self.map2 = nn.Linear(2, 16), nn.Linear(16, 1)

    def load(self, backup):
        for m_from, m_to in zip(backup.modules(), self.modules()):
            if isinstance(m_to, nn.Linear):
                m_to.weight.data = m_from.weight.data.clone()
                if m_to.bias is not None:
                    m_to.bias.data = m_from.bias.data.clone()

    def forward(self, x):
        return torch.sigmoid(self.map2(F.relu(self.map1(x))))


job = relight.init()
torch.manual_seed(1)
g, d = G(), D()
criterion = nn.BCELoss()
d_optimizer = optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.999))
g_optimizer = optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.999))
training = relight.Training(model={"g": g, "d": d}, optimizer={"g": g_optimizer, "d": d_optimizer})
unrolled_steps = 2


def sync(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def d_loop():
    d_optimizer.zero_grad()
    loss = criterion(d(torch.randn(16, 2)), torch.ones(16, 1))
    loss = loss + criterion(d(g(torch.randn(16, 4)).detach()), torch.zeros(16, 1))
    loss.backward()
    sync(d)
    d_optimizer.step()
    return loss.item()


def g_loop():
    g_optimizer.zero_grad()
    d_optimizer.zero_grad()
    backup = copy.deepcopy(d)
    for _ in range(unrolled_steps):
        d_loop()
    g_error = criterion(d(g(torch.randn(16, 4))), torch.ones(16, 1))
    g_error.backward()
    sync(g)
    g_optimizer.step()
    d.load(backup)
    del backup
    return g_error.item()


d_infos, g_infos = [], []
for it in training.steps(until=14):
    with it:
        for d_index in range(2):
            d_infos.append(d_loop())
        for g_index in range(1):
            g_infos.append(g_loop())
    if it.number % 5 == 0:
        print("Epoch", it.number, ": D:", sum(d_infos) / len(d_infos), "G:", sum(g_infos) / len(g_infos))
finish(job, g=g, d=d, go=g_optimizer, do=d_optimizer)
