"""A trainer with `exists` and `default`, a loader cycled by a generator inside each step, an EMA module with a counter, milestones."""

# ranks: 2
import math
from copy import deepcopy
from functools import partial, wraps

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def exists(x):
    return x is not None


def default(val, d):
    return val if exists(val) else (d() if callable(d) else d)


def once(fn):
    called = False

    @wraps(fn)
    def inner(x):
        nonlocal called
        if called:
            return
        called = True
        return fn(x)

    return inner


messages = []
print_once = once(messages.append)


def num_to_groups(num, divisor):
    groups, remainder = num // divisor, num % divisor
    return [divisor] * groups + ([remainder] if remainder else [])


class EMA(nn.Module):
    def __init__(self, model, beta=0.99, update_after_step=3, update_every=2, inv_gamma=1.0, power=2 / 3):
        super().__init__()
        self.beta, self.update_after_step, self.update_every, self.inv_gamma, self.power = (
            beta,
            update_after_step,
            update_every,
            inv_gamma,
            power,
        )
        self.online_model = [model]
        self.ema_model = deepcopy(model).requires_grad_(False)
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))

    @property
    def model(self):
        return self.online_model[0]

    def get_current_decay(self):
        epoch = (self.step - self.update_after_step - 1).clamp(min=0.0)
        return (
            0.0 if epoch.item() <= 0 else (1 - (1 + epoch / self.inv_gamma) ** -self.power).clamp(max=self.beta).item()
        )

    def update(self):
        step = self.step.item()
        self.step += 1
        if (step % self.update_every) != 0:
            return
        if step <= self.update_after_step:
            self.copy_params()
            return
        if not self.initted.item():
            self.copy_params()
            self.initted.data.copy_(torch.tensor(True))
        decay = self.get_current_decay()
        for ma, cur in zip(self.ema_model.parameters(), self.model.parameters()):
            ma.data.lerp_(cur.data, 1.0 - decay)

    def copy_params(self):
        for ma, cur in zip(self.ema_model.parameters(), self.model.parameters()):
            ma.data.copy_(cur.data)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.g * x.shape[-1] ** 0.5


class Denoiser(nn.Module):
    def __init__(self, dim=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim * 2 + 1, 24), RMSNorm(24), nn.SiLU(), nn.Linear(24, dim))

    def forward(self, x, t, x_self_cond=None):
        x_self_cond = default(x_self_cond, lambda: torch.zeros_like(x))
        return self.net(torch.cat([x_self_cond, x, t[:, None]], 1))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=8, offset=0.1):
        super().__init__()
        self.model, self.num_timesteps, self.offset = model, timesteps, offset
        betas = torch.linspace(1e-2, 0.3, timesteps, dtype=torch.float64)
        register = lambda name, val: self.register_buffer(name, val.to(torch.float32))
        cum = torch.cumprod(1 - betas, 0)
        register("sqrt_alphas_cumprod", cum.sqrt())
        register("sqrt_one_minus", (1 - cum).sqrt())
        register("loss_weight", torch.minimum(cum / (1 - cum), torch.tensor(5.0)))

    def forward(self, x):
        t = torch.randint(0, self.num_timesteps, (len(x),)).long()
        noise = torch.randn_like(x) + self.offset * torch.randn(len(x), 1)
        xt = self.sqrt_alphas_cumprod[t, None] * x + self.sqrt_one_minus[t, None] * noise
        cond = None
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                cond = self.model(xt, t / self.num_timesteps).detach_()
        out = self.model(xt, t / self.num_timesteps, cond)
        return (F.mse_loss(out, noise, reduction="none").mean(1) * self.loss_weight[t]).mean()

    @torch.no_grad()
    def sample(self, batch_size=4):
        x = torch.randn(batch_size, 5)
        for t in reversed(range(self.num_timesteps)):
            x = x - 0.1 * self.model(x, torch.full((batch_size,), t / self.num_timesteps))
        return x


class Trainer:
    def __init__(self, diffusion, *, train_num_steps, gradient_accumulate_every=2, save_every=5):
        self.diffusion, self.model = diffusion, DDP(diffusion)
        self.opt = torch.optim.Adam(diffusion.parameters(), lr=4e-3, betas=(0.9, 0.99))
        self.ema, self.step, self.train_num_steps = EMA(diffusion), 0, train_num_steps
        self.accumulate, self.save_every, self.milestones, self.best_fid = (
            gradient_accumulate_every,
            save_every,
            [],
            math.inf,
        )

    def train(self):
        training = relight.Training(
            model=self.model,
            optimizer=self.opt,
            ema=self.ema,
            data=lambda n: torch.randn(6, 5),
            accumulate=self.accumulate,
        )
        for step in training.steps(until=self.train_num_steps):
            with step as batches:
                total_loss = 0.0
                for data in batches:
                    loss = self.model(data) / self.accumulate
                    total_loss += loss.item()
                    loss.backward()
                nn.utils.clip_grad_norm_(self.diffusion.parameters(), 1.0)
                self.opt.step()
                self.opt.zero_grad()
                self.step += 1
                self.ema.update()
                if self.step != 0 and self.step % self.save_every == 0:
                    self.ema.ema_model.eval()
                    samples = torch.cat(
                        list(map(lambda n: self.ema.ema_model.sample(batch_size=n), num_to_groups(6, 4)))
                    )
                    fid = samples.square().mean().item()
                    print_once(f"first milestone {self.step}")
                    if self.best_fid > fid:
                        self.best_fid = fid
                    self.milestones.append((self.step, fid))


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(11)
    trainer = Trainer(GaussianDiffusion(Denoiser()), train_num_steps=16)
    trainer.train()
    finish(
        job,
        model=trainer.model,
        opt=trainer.opt,
        ema=trainer.ema,
        step=trainer.step,
        fid=trainer.best_fid,
        milestones=trainer.milestones,
        messages=messages,
    )
