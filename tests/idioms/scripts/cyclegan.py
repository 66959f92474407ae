"""CycleGAN: two generators under one optimizer, two discriminators, itertools.chain, and pools of earlier fakes.

The pools are Python objects that the script carries from step to step, different on each rank; handed over as per_rank.
"""

import itertools
import random

import torch
from torch import nn

import relight
from tests.idioms.digest import finish


class ImagePool:
    def __init__(self, pool_size):
        self.pool_size = pool_size
        self.images = []

    def query(self, images):
        return_images = []
        for image in images:
            image = image.detach().unsqueeze(0)
            if len(self.images) < self.pool_size:
                self.images.append(image)
                return_images.append(image)
            elif random.uniform(0, 1) > 0.5:
                index = random.randint(0, self.pool_size - 1)
                return_images.append(self.images[index].clone())
                self.images[index] = image
            else:
                return_images.append(image)
        return torch.cat(return_images, 0)

    def state_dict(self):
        return {"images": list(self.images)}

    def load_state_dict(self, state):
        self.images = list(state["images"])


def mlp(cout):
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, cout)))


def set_requires_grad(nets, requires_grad=False):
    for net in nets:
        for param in net.parameters():
            param.requires_grad = requires_grad


def main():
    job = relight.init()
    torch.manual_seed(77)
    G_A, G_B, D_A, D_B = mlp(6), mlp(6), mlp(1), mlp(1)
    pool_A, pool_B = ImagePool(10), ImagePool(10)
    opt_G = torch.optim.Adam(itertools.chain(G_A.parameters(), G_B.parameters()), lr=1e-3, betas=(0.5, 0.999))
    opt_D = torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), lr=1e-3, betas=(0.5, 0.999))
    mse, l1 = nn.MSELoss(), nn.L1Loss()
    training = relight.Training(
        model={"G_A": G_A, "G_B": G_B, "D_A": D_A, "D_B": D_B},
        optimizer={"G": opt_G, "D": opt_D},
        data=lambda n: (torch.randn(4, 6) + 1, torch.randn(4, 6) - 1),
        per_rank={"pool_A": pool_A, "pool_B": pool_B},
    )
    for step in training.steps(until=14):
        with step as (real_A, real_B):
            fake_B, fake_A = G_A(real_A), G_B(real_B)
            set_requires_grad([D_A, D_B], False)
            opt_G.zero_grad()
            pred_B, pred_A = D_A.module(fake_B), D_B.module(fake_A)
            loss_G = mse(pred_B, torch.ones_like(pred_B)) + mse(pred_A, torch.ones_like(pred_A))
            loss_G = loss_G + 10 * (l1(G_B.module(fake_B), real_A) + l1(G_A.module(fake_A), real_B))
            loss_G.backward()
            opt_G.step()
            set_requires_grad([D_A, D_B], True)
            opt_D.zero_grad()
            for net, real, fake in ((D_A, real_B, pool_B.query(fake_B)), (D_B, real_A, pool_A.query(fake_A))):
                pred_real, pred_fake = net(torch.cat([real, fake])).chunk(2)
                loss_D = (
                    mse(pred_real, torch.ones_like(pred_real)) + mse(pred_fake, torch.zeros_like(pred_fake))
                ) * 0.5
                loss_D.backward()
            opt_D.step()
    finish(job, G_A=G_A, G_B=G_B, D_A=D_A, D_B=D_B, opt_G=opt_G, opt_D=opt_D, a=pool_A, b=pool_B)


if __name__ == "__main__":
    main()
