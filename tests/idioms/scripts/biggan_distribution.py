"""BigGAN: latents are tensors of a class of their own that is filled again in place; toggled gradients, accumulation, EMA."""

# ranks: 2
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Distribution(torch.Tensor):
    def init_distribution(self, dist_type, **kwargs):
        self.dist_type, self.dist_kwargs = dist_type, kwargs
        if dist_type == "normal":
            self.mean_, self.var_ = kwargs["mean"], kwargs["var"]
        elif dist_type == "categorical":
            self.num_categories = kwargs["num_categories"]

    def sample_(self):
        if self.dist_type == "normal":
            self.normal_(self.mean_, self.var_)
        elif self.dist_type == "categorical":
            self.random_(0, self.num_categories)


def prepare_z_y(batch, dim_z, nclasses, z_var=1.0):
    z_ = Distribution(torch.randn(batch, dim_z, requires_grad=False))
    z_.init_distribution("normal", mean=0, var=z_var)
    y_ = Distribution(torch.zeros(batch, requires_grad=False))
    y_.init_distribution("categorical", num_categories=nclasses)
    return z_, y_


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.lin, self.bn, self.out = (
            nn.Embedding(3, 4),
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 6),
        )

    def forward(self, z, y):
        return torch.tanh(self.out(F.relu(self.bn(self.lin(torch.cat([z, self.shared(y)], 1))))))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        sn = nn.utils.spectral_norm
        self.a, self.b, self.embed = sn(nn.Linear(6, 16)), sn(nn.Linear(16, 1)), sn(nn.Embedding(3, 16))

    def forward(self, x, y):
        h = F.relu(self.a(x))
        return self.b(h) + (self.embed(y) * h).sum(1, keepdim=True)


class ema:
    def __init__(self, source, target, decay=0.99, start_itr=3):
        self.source, self.target, self.decay, self.start_itr = source, target, decay, start_itr
        self.source_dict, self.target_dict = self.source.state_dict(), self.target.state_dict()
        with torch.no_grad():
            for key in self.source_dict:
                self.target_dict[key].data.copy_(self.source_dict[key].data)

    def update(self, itr=None):
        decay = 0.0 if itr and itr < self.start_itr else self.decay
        with torch.no_grad():
            for key in self.source_dict:
                self.target_dict[key].data.copy_(
                    self.target_dict[key].data * decay + self.source_dict[key].data * (1 - decay)
                )


def toggle_grad(model, on_or_off):
    for param in model.parameters():
        param.requires_grad = on_or_off


def ortho(model, strength=1e-3):
    with torch.no_grad():
        for param in model.parameters():
            if len(param.shape) < 2:
                continue
            w = param.view(param.shape[0], -1)
            grad = 2 * torch.mm(torch.mm(w, w.t()) * (1.0 - torch.eye(w.shape[0])), w)
            param.grad.data += strength * grad.view(param.shape)


def GAN_training_function(G, D, G_ema, z_, y_, ema_, state_dict, opt):
    def train(x, y):
        opt["G"].zero_grad()
        opt["D"].zero_grad()
        x, y = torch.split(x, 6), torch.split(y, 6)
        counter = 0
        for _ in range(2):
            toggle_grad(D, True)
            toggle_grad(G, False)
            opt["D"].zero_grad()
            z_.sample_()
            y_.sample_()
            with torch.no_grad():
                fake = G(z_[:6].as_subclass(torch.Tensor), y_[:6].as_subclass(torch.Tensor).long())
            D_fake = D(fake, y_[:6].as_subclass(torch.Tensor).long())
            D_real = D(x[counter], y[counter])
            (F.relu(1.0 - D_real).mean() + F.relu(1.0 + D_fake).mean()).backward()
            counter += 1
            ortho(D.module)
            opt["D"].step()
        toggle_grad(D, False)
        toggle_grad(G, True)
        opt["G"].zero_grad()
        z_.sample_()
        y_.sample_()
        labels = y_.as_subclass(torch.Tensor).long()
        (-D.module(G(z_.as_subclass(torch.Tensor), labels), labels).mean()).backward()
        opt["G"].step()
        if state_dict["itr"] > 1:
            ema_.update(state_dict["itr"])

    return train


def main():
    job = relight.init()
    torch.manual_seed(2)
    G, D, G_ema = Generator(), Discriminator(), Generator()
    ema_ = ema(G, G_ema)
    G, D = DDP(G, broadcast_buffers=False), DDP(D, broadcast_buffers=False)
    opt = {
        "G": torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9)),
        "D": torch.optim.Adam(D.parameters(), lr=4e-3, betas=(0.0, 0.9)),
    }
    z_, y_ = prepare_z_y(12, 4, 3)
    state_dict = {"itr": 0, "epoch": 0}
    train = GAN_training_function(G, D, G_ema, z_, y_, ema_, state_dict, opt)
    sample = functools.partial(torch.randint, 0, 3, (12,))
    training = relight.Training(
        model={"G": G, "D": D, "G_ema": G_ema}, optimizer=opt, data=lambda n: (torch.randn(12, 6), sample())
    )
    for step in training.steps(until=14):
        with step as (x, y):
            state_dict["itr"] += 1
            G.train()
            D.train()
            G_ema.train()
            train(x, y)
    finish(job, G=G, D=D, ema=G_ema, optG=opt["G"], optD=opt["D"], itr=state_dict["itr"])


if __name__ == "__main__":
    main()
