"""pix2pix: a model class with set_input, forward, optimize_parameters, and set_requires_grad that freezes D for G's update.

D's parameters take no gradient for a moment in every step; two writes; learning rates by LambdaLR for both.
"""

import torch
import torch.nn as nn

import relight
from tests.idioms.digest import finish


def define(cin, cout):
    net = nn.Sequential(
        nn.Conv2d(cin, 6, 3, padding=1), nn.InstanceNorm2d(6), nn.ReLU(), nn.Conv2d(6, cout, 3, padding=1)
    )
    return nn.parallel.DistributedDataParallel(net)


class Pix2PixModel:
    def __init__(self, lambda_L1=10.0):
        self.lambda_L1 = lambda_L1
        self.netG = define(2, 1)
        self.netD = define(3, 1)
        self.criterionGAN = nn.MSELoss()
        self.criterionL1 = nn.L1Loss()
        self.optimizer_G = torch.optim.Adam(self.netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.optimizer_D = torch.optim.Adam(self.netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.schedulers = {
            name: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e - 8) / 10)
            for name, o in (("sG", self.optimizer_G), ("sD", self.optimizer_D))
        }

    def set_requires_grad(self, net, requires_grad):
        for param in net.parameters():
            param.requires_grad = requires_grad

    def set_input(self, input):
        self.real_A, self.real_B = input["A"], input["B"]

    def forward(self):
        self.fake_B = self.netG(self.real_A)

    def gan_loss(self, prediction, real):
        return self.criterionGAN(prediction, torch.full_like(prediction, float(real)))

    def backward_D(self):
        pred_fake = self.netD(torch.cat((self.real_A, self.fake_B), 1).detach())
        pred_real = self.netD(torch.cat((self.real_A, self.real_B), 1))
        loss_D = (self.gan_loss(pred_fake, False) + self.gan_loss(pred_real, True)) * 0.5
        loss_D.backward()

    def backward_G(self):
        pred_fake = self.netD(torch.cat((self.real_A, self.fake_B), 1))
        loss_G = self.gan_loss(pred_fake, True) + self.criterionL1(self.fake_B, self.real_B) * self.lambda_L1
        loss_G.backward()

    def optimize_parameters(self):
        self.forward()
        self.set_requires_grad(self.netD, True)
        self.optimizer_D.zero_grad()
        self.backward_D()
        self.optimizer_D.step()
        self.set_requires_grad(self.netD, False)
        self.optimizer_G.zero_grad()
        self.backward_G()
        self.optimizer_G.step()

    def update_learning_rate(self):
        for scheduler in self.schedulers.values():
            scheduler.step()


def dataset(index):
    a = torch.randn(3, 2, 6, 6)
    return {"A": a, "B": a.mean(1, keepdim=True).tanh()}


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(10)
    model = Pix2PixModel()
    training = relight.Training(
        model={"G": model.netG, "D": model.netD},
        optimizer={"G": model.optimizer_G, "D": model.optimizer_D},
        data=dataset,
        **model.schedulers,
    )
    for step in training.steps(until=16):
        with step as data:
            model.set_input(data)
            model.optimize_parameters()
            if (step.number + 1) % 4 == 0:
                model.update_learning_rate()
    finish(job, G=model.netG, D=model.netD, oG=model.optimizer_G, oD=model.optimizer_D, s=model.schedulers)
