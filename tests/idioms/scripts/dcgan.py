"""DCGAN as in the tutorial: D's update, then G's, in one step, both under DDP with BatchNorm in both networks.

Two writes in a step, with collectives (G's gradients) between them; statistics of BatchNorm change after the first.
"""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

nz, ngf, ndf = 6, 6, 6
num_steps = 18


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1)


job = relight.init()
torch.manual_seed(999)
dataset = TensorDataset(torch.randn(120, 1, 8, 8).tanh())
dataloader = DataLoader(dataset, batch_size=6, sampler=DistributedSampler(dataset, job.world_size, job.rank))
netG, netD = Generator(), Discriminator()
netG.apply(weights_init)
netD.apply(weights_init)
netG, netD = DDP(netG), DDP(netD, broadcast_buffers=False)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
training = relight.Training(model={"G": netG, "D": netD}, optimizer={"G": optimizerG, "D": optimizerD}, data=dataloader)

for step in training.steps(until=num_steps):
    with step as (real,):
        b_size = real.size(0)
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.full((b_size,), 1.0))
        errD_real.backward()
        fake = netG(torch.randn(b_size, nz, 1, 1))
        errD_fake = criterion(netD(fake.detach()), torch.zeros(b_size))
        errD_fake.backward()
        optimizerD.step()
        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(b_size))
        errG.backward()
        optimizerG.step()
finish(job, G=netG, D=netD, optG=optimizerG, optD=optimizerD)
