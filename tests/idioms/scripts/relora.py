"""ReLoRA: every few steps the adapters are merged into frozen weights, made anew, and their moments pruned."""

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ReLoRaLinear(nn.Module):
    def __init__(self, inp, out, r=3, scaling=0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inp), requires_grad=False)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.bias = nn.Parameter(torch.zeros(out))
        self.lora_A, self.lora_B = nn.Linear(inp, r, bias=False), nn.Linear(r, out, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = scaling

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x)) * self.scaling

    @torch.no_grad()
    def merge_and_reinit(self):
        self.weight.data += self.lora_B.weight @ self.lora_A.weight * self.scaling
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)


def optimizer_reset(optimizer, reset_params, ratio):
    for p in reset_params:
        state = optimizer.state[p]
        for key in ("exp_avg", "exp_avg_sq"):
            mask = torch.rand_like(state[key]) > ratio
            state[key].mul_(mask)


def jagged(step, every=6, warmup=2):
    return min(1.0, (step % every + 1) / warmup) * (1 - step / 60)


job = relight.init()
torch.manual_seed(34)
net = nn.Sequential(ReLoRaLinear(6, 16), nn.GELU(), ReLoRaLinear(16, 2))
model = DDP(net)
trainable = [p for p in model.parameters() if p.requires_grad]
lora = [p for n, p in model.named_parameters() if "lora_" in n]
optimizer = torch.optim.Adam(trainable, lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, jagged)
training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(8, 6))
n_lora_restarts, update_step = 0, 0
for step in training.steps(until=20):
    with step as x:
        loss = (model(x) - x[:, :2].sin()).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        update_step += 1
        if update_step % 6 == 0:
            n_lora_restarts += 1
            torch.manual_seed(1000 + update_step)
            for module in net.modules():
                if isinstance(module, ReLoRaLinear):
                    module.merge_and_reinit()
            optimizer_reset(optimizer, lora, 0.9)
finish(job, model=model, optimizer=optimizer, n=n_lora_restarts, u=update_step, lr=scheduler.get_last_lr())
