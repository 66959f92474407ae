"""BasicSR's models: a training pair pool whose tensors are made by the first batch, EMA by name, warm-up of rates kept in
lists, a log_dict, two optimizers in a list, networks frozen for a moment."""

# ranks: 2
import random
from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight
from tests.idioms.digest import finish


class SRModel:
    def __init__(self, opt):
        self.opt, self.optimizers, self.schedulers = opt, [], []
        self.log_dict = OrderedDict()
        self.queue_size = opt["queue_size"]
        self.net_g = self.model_to_device(
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
        )
        self.net_d = self.model_to_device(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(288, 1))
        )
        self.net_g_ema = deepcopy(self.net_g.module).eval()
        self.model_ema(0)
        self.optimizer_g = torch.optim.Adam(self.net_g.parameters(), lr=1e-3, betas=(0.9, 0.99))
        self.optimizer_d = torch.optim.Adam(self.net_d.parameters(), lr=1e-3, betas=(0.9, 0.99))
        self.optimizers += [self.optimizer_g, self.optimizer_d]
        for optimizer in self.optimizers:
            self.schedulers.append(torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 14], 0.5))

    def model_to_device(self, net):
        return DistributedDataParallel(net, find_unused_parameters=False)

    def model_ema(self, decay=0.9):
        net_g_params = dict(self.net_g.module.named_parameters())
        net_g_ema_params = dict(self.net_g_ema.named_parameters())
        for k in net_g_ema_params.keys():
            net_g_ema_params[k].data.mul_(decay).add_(net_g_params[k].data, alpha=1 - decay)

    def _set_lr(self, lr_groups_l):
        for optimizer, lr_groups in zip(self.optimizers, lr_groups_l):
            for param_group, lr in zip(optimizer.param_groups, lr_groups):
                param_group["lr"] = lr

    def _get_init_lr(self):
        return [[v["initial_lr"] for v in optimizer.param_groups] for optimizer in self.optimizers]

    def update_learning_rate(self, current_iter, warmup_iter=-1):
        if current_iter > 1:
            for scheduler in self.schedulers:
                scheduler.step()
        if current_iter < warmup_iter:
            self._set_lr([[v / warmup_iter * current_iter for v in group] for group in self._get_init_lr()])

    @torch.no_grad()
    def _dequeue_and_enqueue(self):
        b, c, h, w = self.lq.size()
        if not hasattr(self, "queue_lr"):
            assert self.queue_size % b == 0
            self.queue_lr = torch.zeros(self.queue_size, c, h, w)
            self.queue_gt = torch.zeros(self.queue_size, *self.gt.shape[1:])
            self.queue_ptr = 0
        if self.queue_ptr == self.queue_size:
            idx = torch.randperm(self.queue_size)
            self.queue_lr, self.queue_gt = self.queue_lr[idx], self.queue_gt[idx]
            lq_dequeue, gt_dequeue = self.queue_lr[0:b].clone(), self.queue_gt[0:b].clone()
            self.queue_lr[0:b], self.queue_gt[0:b] = self.lq.clone(), self.gt.clone()
            self.lq, self.gt = lq_dequeue, gt_dequeue
        else:
            self.queue_lr[self.queue_ptr : self.queue_ptr + b] = self.lq.clone()
            self.queue_gt[self.queue_ptr : self.queue_ptr + b] = self.gt.clone()
            self.queue_ptr = self.queue_ptr + b

    def feed_data(self, data):
        self.gt = data
        noise = random.choice([0.05, 0.1, 0.2])
        self.lq = (data + noise * torch.randn_like(data)).clamp(0, 1)
        self._dequeue_and_enqueue()

    def optimize_parameters(self, current_iter):
        for p in self.net_d.parameters():
            p.requires_grad = False
        self.optimizer_g.zero_grad()
        self.output = self.net_g(self.lq)
        loss_dict = OrderedDict()
        l_g_pix = (self.output - self.gt).abs().mean()
        l_g_gan = nn.functional.softplus(-self.net_d(self.output)).mean()
        loss_dict["l_g_pix"], loss_dict["l_g_gan"] = l_g_pix, l_g_gan
        (l_g_pix + 0.1 * l_g_gan).backward()
        self.optimizer_g.step()
        for p in self.net_d.parameters():
            p.requires_grad = True
        self.optimizer_d.zero_grad()
        l_d_real = nn.functional.softplus(-self.net_d(self.gt)).mean()
        loss_dict["l_d_real"] = l_d_real
        l_d_real.backward()
        l_d_fake = nn.functional.softplus(self.net_d(self.output.detach().clone())).mean()
        l_d_fake.backward()
        self.optimizer_d.step()
        self.model_ema(decay=0.9)
        self.log_dict = self.reduce_loss_dict(loss_dict)

    def reduce_loss_dict(self, loss_dict):
        with torch.no_grad():
            keys, losses = [], []
            for name, value in loss_dict.items():
                keys.append(name)
                losses.append(value)
            losses = torch.stack(losses, 0)
            dist.all_reduce(losses)
            return OrderedDict((key, loss.mean().item()) for key, loss in zip(keys, losses))


class MessageLogger:
    def __init__(self, opt):
        self.interval, self.messages = opt["print_freq"], []

    def __call__(self, current_iter, log_dict):
        if current_iter % self.interval == 0:
            self.messages.append(f"[iter:{current_iter:8,d}] " + " ".join(f"{k}: {v:.4e}" for k, v in log_dict.items()))


job = relight.init()
random.seed(10 + job.rank)
torch.manual_seed(10 + job.rank)
model = SRModel({"queue_size": 12, "print_freq": 5})
msg_logger = MessageLogger({"print_freq": 5})
training = relight.Training(
    model={"g": model.net_g, "d": model.net_d}, optimizer={"g": model.optimizer_g, "d": model.optimizer_d},
    scheduler=model.schedulers, ema=model.net_g_ema, data=lambda n: torch.rand(4, 3, 8, 8),
)  # fmt: skip
current_iter = 0
for step in training.steps(until=20):
    with step as train_data:
        current_iter += 1
        model.update_learning_rate(current_iter, warmup_iter=3)
        model.feed_data(train_data)
        model.optimize_parameters(current_iter)
        msg_logger(current_iter, model.log_dict)
finish(
    job, g=model.net_g, d=model.net_d, ema=model.net_g_ema, opt=model.optimizer_g, queue=model.queue_lr,
    ptr=model.queue_ptr, log=model.log_dict, messages=msg_logger.messages, current=current_iter,
)  # fmt: skip
