"""AdaLoRA: importance of triplets averaged in dicts by name, a budget on a cubic schedule, masks from kthvalue, an
orthogonal regularizer, adapters patched into a base model."""

# ranks: 2
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class SVDLinear(nn.Linear):
    def __init__(self, in_features, out_features, r=4, lora_alpha=4):
        super().__init__(in_features, out_features)
        self.lora_A = nn.Parameter(torch.randn(r, in_features) * 0.02)
        self.lora_E = nn.Parameter(torch.randn(r, 1) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(out_features, r) * 0.02)
        self.ranknum = nn.Parameter(torch.tensor([float(r)]), requires_grad=False)
        self.scaling = lora_alpha
        self.weight.requires_grad = self.bias.requires_grad = False

    def forward(self, x):
        delta = (x @ (self.lora_A * self.lora_E).T @ self.lora_B.T) * self.scaling / (self.ranknum + 1e-5)
        return super().forward(x) + delta


class RankAllocator:
    def __init__(
        self, model, target_rank, init_warmup, final_warmup, mask_interval, beta1=0.85, beta2=0.85, total_step=24
    ):
        self.target_rank, self.initial_warmup, self.final_warmup = target_rank, init_warmup, final_warmup
        self.mask_interval, self.beta1, self.beta2, self.total_step = mask_interval, beta1, beta2, total_step
        self.model = model
        self.ipt, self.exp_avg_ipt, self.exp_avg_unc = {}, {}, {}
        self.cat_ipt, self.rank_pattern = {}, {}
        self.get_lora_param_name()

    def get_lora_param_name(self):
        self.name_set = set()
        self.total_rank, self.shape_dict = 0, {}
        for n, p in self.model.named_parameters():
            if "lora_A" in n:
                self.name_set.add(n.replace("lora_A", "%s"))
                self.total_rank += p.size(0)
        self.name_set = list(sorted(self.name_set))

    def schedule_threshold(self, step):
        mask_ind = False
        if step <= self.initial_warmup:
            curr_rank = self.total_rank
        elif step > self.total_step - self.final_warmup:
            curr_rank, mask_ind = self.target_rank, True
        else:
            mul = 1 - (step - self.initial_warmup) / (self.total_step - self.final_warmup - self.initial_warmup)
            curr_rank = int(self.target_rank + (self.total_rank - self.target_rank) * mul**3)
            mask_ind = step % self.mask_interval == 0
        return curr_rank, mask_ind

    def update_ipt(self, model):
        for n, p in model.named_parameters():
            if "lora_" in n:
                if n not in self.ipt:
                    self.ipt[n], self.exp_avg_ipt[n] = torch.zeros_like(p), torch.zeros_like(p)
                    self.exp_avg_unc[n] = torch.zeros_like(p)
                with torch.no_grad():
                    self.ipt[n] = (p * p.grad).abs().detach()
                    self.exp_avg_ipt[n] = self.beta1 * self.exp_avg_ipt[n] + (1 - self.beta1) * self.ipt[n]
                    unc = (self.ipt[n] - self.exp_avg_ipt[n]).abs()
                    self.exp_avg_unc[n] = self.beta2 * self.exp_avg_unc[n] + (1 - self.beta2) * unc

    def mask_to_target_rank(self, model, curr_rank):
        scores, all_scores = {}, []
        params = dict(model.named_parameters())
        for name in self.name_set:
            a, b, e = (
                (self.exp_avg_ipt[name % k] * self.exp_avg_unc[name % k]) for k in ("lora_A", "lora_B", "lora_E")
            )
            scores[name] = e.view(-1) + a.mean(1) + b.mean(0)
            all_scores.append(scores[name])
        threshold = torch.kthvalue(torch.cat(all_scores), max(1, self.total_rank - curr_rank))[0].item()
        with torch.no_grad():
            for name, score in scores.items():
                params[name % "lora_E"].data.masked_fill_((score <= threshold).view(-1, 1), 0.0)
                self.rank_pattern[name] = int((score > threshold).sum())
        return threshold

    def update_and_mask(self, model, global_step):
        if global_step < self.total_step - self.final_warmup:
            self.update_ipt(model)
        curr_rank, mask_ind = self.schedule_threshold(global_step)
        mask_threshold = (
            self.mask_to_target_rank(model, curr_rank) if mask_ind and curr_rank < self.total_rank else None
        )
        return curr_rank, mask_threshold


def compute_orth_regu(model, regu_weight=0.1):
    regu_loss, num_param = 0.0, 0
    for n, p in model.named_parameters():
        if "lora_A" in n or "lora_B" in n:
            cov = p @ p.T if "lora_A" in n else p.T @ p
            regu_loss += torch.norm(cov - torch.eye(*cov.size()), p="fro")
            num_param += 1
    return regu_weight * regu_loss / num_param


job = relight.init()
torch.manual_seed(3)
net = nn.Sequential(SVDLinear(8, 16), nn.Tanh(), SVDLinear(16, 16), nn.Tanh(), SVDLinear(16, 4))
model = DDP(net)
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=5e-3)
rankallocator = RankAllocator(net, target_rank=5, init_warmup=4, final_warmup=6, mask_interval=3)
training = relight.Training(
    model=model, optimizer=optimizer, data=lambda n: (torch.randn(8, 8), torch.randint(4, (8,)))
)
curr_rank, mask_threshold, tr_loss, history = rankallocator.total_rank, None, 0.0, []
for step in training.steps(until=24):
    with step as (x, y):
        loss = nn.functional.cross_entropy(model(x), y) + compute_orth_regu(net)
        loss.backward()
        optimizer.step()
        curr_rank, mask_threshold = rankallocator.update_and_mask(net, step.number)
        optimizer.zero_grad()
        tr_loss += loss.item()
        if math.isfinite(tr_loss) and step.number % 6 == 5:
            history.append((step.number, curr_rank, mask_threshold))
finish(
    job, model=net, optimizer=optimizer, ipt=rankallocator.exp_avg_ipt, unc=rankallocator.exp_avg_unc,
    pattern=rankallocator.rank_pattern, history=history, tr_loss=tr_loss,
)  # fmt: skip
