"""A WGAN with clipped weights: several critic updates in a step, each followed by a clamp through .data."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(6)
netG = DDP(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)))
netD = DDP(nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
optimizerD = torch.optim.RMSprop(netD.parameters(), lr=5e-3)
optimizerG = torch.optim.RMSprop(netG.parameters(), lr=5e-3)
one = torch.tensor(1.0)
mone = one * -1
training = relight.Training(
    model={"G": netG, "D": netD},
    optimizer={"G": optimizerG, "D": optimizerD},
    data=lambda n: torch.randn(6, 5),
    accumulate=3,
)
gen_iterations = 0
for step in training.steps(until=14):
    with step as data:
        for p in netD.parameters():
            p.requires_grad = True
        Diters = 3 if gen_iterations < 4 or gen_iterations % 5 == 0 else 2
        j = 0
        while j < Diters:
            for p in netD.parameters():
                p.data.clamp_(-0.05, 0.05)
            real = data[j]
            j += 1
            netD.zero_grad()
            errD_real = netD(real).mean()
            errD_real.backward(one)
            with torch.no_grad():
                fake = netG(torch.randn(6, 4))
            errD_fake = netD(fake).mean()
            errD_fake.backward(mone)
            optimizerD.step()
        for p in netD.parameters():
            p.requires_grad = False
        netG.zero_grad()
        errG = netD(netG(torch.randn(6, 4))).mean()
        errG.backward(one)
        optimizerG.step()
        gen_iterations += 1
finish(job, G=netG, D=netD, oG=optimizerG, oD=optimizerD, gen_iterations=gen_iterations)
