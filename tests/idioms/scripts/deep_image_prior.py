"""Deep image prior: globals count and average, the noise of the input is kept, and a step goes back to the last network's
tensors when the PSNR has fallen: everything in one closure, as in the notebook."""

# ranks: 2
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(0)
img_noisy = torch.rand(1, 3, 12, 12)
net_input = torch.rand(1, 4, 12, 12) * 0.1
net = nn.Sequential(nn.Conv2d(4, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 3, 1), nn.Sigmoid())
optimizer = optim.Adam(net.parameters(), lr=0.05)
training = relight.Training(model=net, optimizer=optimizer)

reg_noise_std = 1.0 / 30.0
exp_weight = 0.9
show_every = 3
net_input_saved = net_input.detach().clone()
noise = net_input.detach().clone()
out_avg = None
last_net = None
psrn_noisy_last = 0
i = 0


def closure():
    global i, out_avg, psrn_noisy_last, last_net, net_input
    if reg_noise_std > 0:
        net_input = net_input_saved + (noise.normal_() * reg_noise_std)
    out = net(net_input)
    if out_avg is None:
        out_avg = out.detach()
    else:
        out_avg = out_avg * exp_weight + out.detach() * (1 - exp_weight)
    total_loss = F.mse_loss(out, img_noisy)
    total_loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    mse = F.mse_loss(out_avg, img_noisy)
    dist.all_reduce(mse)
    psrn_noisy = -10 * math.log10(mse.item())
    if i % show_every:
        if psrn_noisy - psrn_noisy_last < -0.2:
            print("Falling back to previous checkpoint.")
            for new_param, net_param in zip(last_net, net.parameters()):
                net_param.data.copy_(new_param)
            i += 1
            return total_loss * 0
        last_net = [x.detach().cpu().clone() for x in net.parameters()]
        psrn_noisy_last = psrn_noisy + (0.3 if i % 5 == 0 else 0)
    i += 1
    return total_loss


for step in training.steps(until=18):
    with step:
        optimizer.zero_grad()
        loss = closure()
        optimizer.step()
    print(f"Iteration {i:05d} Loss {loss.item():f}", end="\r")
finish(job, net=net, opt=optimizer, i=i, out_avg=out_avg, last=psrn_noisy_last)
