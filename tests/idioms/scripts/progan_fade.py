"""Progressive growing: step and alpha as globals, networks in ModuleLists of which a growing part is used, an EMA of the generator
by named parameters, samples counted until the next resolution, a rate by resolution from a dict."""

# ranks: 2

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.progression = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.to_rgb = nn.ModuleList([nn.Linear(8, 6) for _ in range(3)])

    def forward(self, x, step=0, alpha=-1):
        for i, (block, to_rgb) in enumerate(zip(self.progression, self.to_rgb)):
            prev, x = x, F.leaky_relu(block(x), 0.2)
            if i == step:
                out = to_rgb(x)
                if i > 0 and 0 <= alpha < 1:
                    out = (1 - alpha) * self.to_rgb[i - 1](prev) + alpha * out
                return out


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.from_rgb = nn.ModuleList([nn.Linear(6, 8) for _ in range(3)])
        self.progression = nn.ModuleList([nn.Linear(9, 8) for _ in range(3)])
        self.linear, self.n_layer = nn.Linear(8, 1), 3

    def forward(self, x, step=0, alpha=-1):
        out = None
        for i in range(step, -1, -1):
            index = self.n_layer - i - 1
            out = self.from_rgb[index](x) if i == step else out
            std = torch.sqrt(out.var(0, unbiased=False) + 1e-8).mean().expand(out.size(0), 1)
            out = F.leaky_relu(self.progression[index](torch.cat([out, std], 1)), 0.2)
            if i == step and i > 0 and 0 <= alpha < 1:
                out = (1 - alpha) * F.leaky_relu(self.from_rgb[index + 1](x), 0.2) + alpha * out
        return self.linear(out)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(model1, model2, decay=0.9):
    par1, par2 = dict(model1.named_parameters()), dict(model2.named_parameters())
    for k in par1.keys():
        par1[k].data.mul_(decay).add_(par2[k].data, alpha=1 - decay)


def reduce_grads(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


job = relight.init()
torch.manual_seed(8)
generator, discriminator, g_running = Generator(), Discriminator(), Generator()
g_running.train(False)
accumulate(g_running, generator, 0)
g_optimizer = optim.Adam(generator.parameters(), lr=0.001, betas=(0.0, 0.99))
d_optimizer = optim.Adam(discriminator.parameters(), lr=0.001, betas=(0.0, 0.99))
training = relight.Training(
    model={"g": generator, "d": discriminator, "run": g_running}, optimizer={"g": g_optimizer, "d": d_optimizer}
)
step, alpha, used_sample, max_step, phase = 0, 0, 0, 2, 40
lr = {0: 0.001, 1: 0.002, 2: 0.003}
disc_loss_val = gen_loss_val = grad_loss_val = 0
n_critic = 1
for i in training.steps(until=22):
    with i:
        discriminator.zero_grad()
        requires_grad(generator, False)
        requires_grad(discriminator, True)
        alpha = min(1, 1 / phase * (used_sample + 1)) if step else 1
        if used_sample > phase and step < max_step:
            used_sample, alpha = 0, 0
            step += 1
            for group in g_optimizer.param_groups + d_optimizer.param_groups:
                group["lr"] = lr.get(step, 0.001)
        real_image = torch.randn(6, 6)
        b_size = real_image.size(0)
        used_sample += b_size
        real_predict = discriminator(real_image, step=step, alpha=alpha)
        real_predict = real_predict.mean() - 0.001 * (real_predict**2).mean()
        fake_image = generator(torch.randn(b_size, 4), step=step, alpha=alpha)
        fake_predict = discriminator(fake_image, step=step, alpha=alpha).mean()
        eps = torch.rand(b_size, 1)
        x_hat = (eps * real_image.data + (1 - eps) * fake_image.data).requires_grad_(True)
        hat_predict = discriminator(x_hat, step=step, alpha=alpha)
        grad_x_hat = torch.autograd.grad(outputs=hat_predict.sum(), inputs=x_hat, create_graph=True)[0]
        grad_penalty = 10 * ((grad_x_hat.norm(2, dim=1) - 1) ** 2).mean()
        (fake_predict - real_predict + grad_penalty).backward()
        reduce_grads(discriminator)
        d_optimizer.step()
        if (i.number + 1) % n_critic == 0:
            generator.zero_grad()
            requires_grad(generator, True)
            requires_grad(discriminator, False)
            predict = discriminator(generator(torch.randn(b_size, 4), step=step, alpha=alpha), step=step, alpha=alpha)
            loss = -predict.mean()
            gen_loss_val = loss.item()
            loss.backward()
            reduce_grads(generator)
            g_optimizer.step()
            accumulate(g_running, generator)
    print(f"Size: {4 * 2**step}; G: {gen_loss_val:.3f}; Alpha: {alpha:.5f}")
finish(
    job, g=generator, d=discriminator, run=g_running, go=g_optimizer, do=d_optimizer, step=step, alpha=alpha,
    used=used_sample, val=gen_loss_val,
)  # fmt: skip
