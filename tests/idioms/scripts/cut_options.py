"""CUT's BaseModel: losses and networks by getattr of their names, a projection made by the first batch before the loop, an
image pool, a generator that is frozen by set_requires_grad, patch ids that go from one call to the next."""

# ranks: 2
import random
from abc import ABC, abstractmethod
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ImagePool:
    def __init__(self, pool_size):
        self.pool_size, self.num_imgs, self.images = pool_size, 0, []

    def query(self, images):
        return_images = []
        for image in images:
            image = torch.unsqueeze(image.data, 0)
            if self.num_imgs < self.pool_size:
                self.num_imgs = self.num_imgs + 1
                self.images.append(image)
                return_images.append(image)
            elif random.uniform(0, 1) > 0.5:
                random_id = random.randint(0, self.pool_size - 1)
                tmp = self.images[random_id].clone()
                self.images[random_id] = image
                return_images.append(tmp)
            else:
                return_images.append(image)
        return torch.cat(return_images, 0)


class PatchSampleF(nn.Module):
    def __init__(self, nc=8):
        super().__init__()
        self.nc, self.mlp_init = nc, False

    def create_mlp(self, feats):
        for mlp_id, feat in enumerate(feats):
            setattr(
                self,
                f"mlp_{mlp_id}",
                nn.Sequential(nn.Linear(feat.shape[1], self.nc), nn.ReLU(), nn.Linear(self.nc, self.nc)),
            )
        self.mlp_init = True

    def forward(self, feats, num_patches=8, patch_ids=None):
        return_ids, return_feats = [], []
        if not self.mlp_init:
            self.create_mlp(feats)
        for feat_id, feat in enumerate(feats):
            feat = feat.permute(0, 2, 3, 1).flatten(1, 2)
            patch_id = np.random.permutation(feat.shape[1])[:num_patches] if patch_ids is None else patch_ids[feat_id]
            x = getattr(self, f"mlp_{feat_id}")(feat[:, torch.as_tensor(patch_id), :].flatten(0, 1))
            return_ids.append(patch_id)
            return_feats.append(nn.functional.normalize(x, dim=1))
        return return_feats, return_ids


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)]
        )

    def forward(self, x, encode_only=False):
        feats = []
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
            feats.append(x)
        return feats if encode_only else torch.tanh(self.layers[-1](x))


class BaseModel(ABC):
    def __init__(self):
        self.loss_names, self.model_names, self.visual_names, self.optimizers = [], [], [], []
        self.metric = 0

    @abstractmethod
    def optimize_parameters(self):
        pass

    def get_current_losses(self):
        return OrderedDict((name, float(getattr(self, "loss_" + name))) for name in self.loss_names)

    def set_requires_grad(self, nets, requires_grad=False):
        for net in nets if isinstance(nets, list) else [nets]:
            for param in net.parameters():
                param.requires_grad = requires_grad

    def parallelize(self):
        for name in self.model_names:
            setattr(self, "net" + name, DDP(getattr(self, "net" + name)))


class CUTModel(BaseModel):
    def __init__(self):
        super().__init__()
        self.loss_names, self.model_names = ["G_GAN", "D_real", "D_fake", "G", "NCE"], ["G", "F", "D"]
        self.netG, self.netF = Generator(), PatchSampleF()
        self.netD = nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3))
        self.optimizer_G = torch.optim.Adam(self.netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.optimizer_D = torch.optim.Adam(self.netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.fake_pool = ImagePool(6)
        self.optimizers += [self.optimizer_G, self.optimizer_D]

    def data_dependent_initialize(self, data):
        self.set_input(data)
        with torch.no_grad():
            self.netF(self.netG(self.real_A, encode_only=True))
        self.optimizer_F = torch.optim.Adam(self.netF.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.optimizers.append(self.optimizer_F)

    def set_input(self, input):
        self.real_A, self.real_B = input["A"], input["B"]

    def forward(self):
        real = torch.cat((self.real_A, self.real_B), dim=0)
        self.flipped = bool(np.random.random() < 0.5)
        if self.flipped:
            real = torch.flip(real, [3])
        self.fake = self.netG(real)
        self.fake_B, self.idt_B = self.fake[: len(self.real_A)], self.fake[len(self.real_A) :]

    def optimize_parameters(self):
        self.forward()
        self.set_requires_grad(self.netD, True)
        self.optimizer_D.zero_grad()
        self.loss_D_fake = self.netD(self.fake_pool.query(self.fake_B.detach())).square().mean()
        self.loss_D_real = (self.netD(self.real_B) - 1).square().mean()
        ((self.loss_D_fake + self.loss_D_real) * 0.5).backward()
        self.optimizer_D.step()
        self.set_requires_grad(self.netD, False)
        self.optimizer_G.zero_grad()
        self.optimizer_F.zero_grad()
        self.loss_G_GAN = (self.netD(self.fake_B) - 1).square().mean()
        self.loss_NCE = self.calculate_NCE_loss(self.real_A, self.fake_B)
        self.loss_G = self.loss_G_GAN + self.loss_NCE + (self.idt_B - self.real_B).abs().mean()
        self.loss_G.backward()
        self.optimizer_G.step()
        self.optimizer_F.step()

    def calculate_NCE_loss(self, src, tgt):
        feat_q = self.netG.module(tgt, encode_only=True)
        with torch.no_grad():
            feat_k = self.netG.module(torch.flip(src, [3]) if self.flipped else src, encode_only=True)
            pool_k, sample_ids = self.netF.module(feat_k, 8, None)
        pool_q, _ = self.netF(feat_q, 8, sample_ids)
        total = 0.0
        for f_q, f_k in zip(pool_q, pool_k):
            total += nn.functional.cross_entropy(f_q @ f_k.t() / 0.07, torch.arange(len(f_q)))
        return total / len(pool_q)


def main():
    job = relight.init()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = CUTModel()
    fetch = lambda n: {"A": torch.rand(4, 3, 8, 8) * 2 - 1, "B": torch.rand(4, 3, 8, 8) * 2 - 1}  # noqa: E731
    model.data_dependent_initialize(fetch(0))
    model.parallelize()
    training = relight.Training(
        model={name: getattr(model, "net" + name) for name in model.model_names},
        optimizer={"G": model.optimizer_G, "D": model.optimizer_D, "F": model.optimizer_F},
        data=fetch,
    )
    total_iters, losses = 0, OrderedDict()
    for step in training.steps(until=16):
        with step as data:
            total_iters += 4
            model.set_input(data)
            model.optimize_parameters()
            if total_iters % 8 == 0:
                losses = model.get_current_losses()
    finish(job, G=model.netG, D=model.netD, F=model.netF, pool=model.fake_pool.images, losses=losses, total=total_iters)


if __name__ == "__main__":
    main()
