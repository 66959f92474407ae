"""RLHF in TRL's old shape: an adaptive KL controller, running moments of scores over ranks, a reference model, a batch of
queries whose responses are sampled token by token, several epochs of minibatches, stats flattened from nested dicts."""

# ranks: 2
import copy

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AdaptiveKLController:
    def __init__(self, init_kl_coef, target, horizon):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current, n_steps):
        proportional_error = np.clip(current / self.target - 1, -0.2, 0.2)
        self.value *= 1 + proportional_error * n_steps / self.horizon


class RunningMoments:
    def __init__(self):
        self.mean, self.std, self.var, self.count = 0, 1, 1, 1e-24

    @torch.no_grad()
    def update(self, xs):
        s = torch.tensor([xs.sum(), xs.numel()], dtype=torch.float32)
        dist.all_reduce(s)
        xs_mean, xs_count = s[0] / s[1], s[1]
        v = ((xs - xs_mean) ** 2).sum()
        dist.all_reduce(v)
        xs_var = v / xs_count
        delta = xs_mean - self.mean
        tot_count = self.count + xs_count
        tot_sum = xs_var * xs_count + self.var * self.count + delta**2 * self.count * xs_count / tot_count
        self.mean += (delta * xs_count / tot_count).item()
        new_var = tot_sum / tot_count
        self.std = (new_var * tot_count / (tot_count - 1)).float().sqrt().item()
        self.var, self.count = new_var.item(), tot_count.item()
        return xs_mean.item(), (xs_var * xs_count / (xs_count - 1)).sqrt().item()


class PolicyWithValue(nn.Module):
    def __init__(self, v=12, d=16):
        super().__init__()
        self.emb, self.rnn, self.lm_head, self.v_head = (
            nn.Embedding(v, d),
            nn.Linear(2 * d, d),
            nn.Linear(d, v),
            nn.Linear(d, 1),
        )

    def forward(self, ids):
        h, hs = torch.zeros(ids.size(0), 16), []
        for t in range(ids.size(1)):
            h = torch.tanh(self.rnn(torch.cat([self.emb(ids[:, t]), h], 1)))
            hs.append(h)
        hs = torch.stack(hs, 1)
        return self.lm_head(hs), self.v_head(hs).squeeze(-1)


def flatten_dict(nested, sep="/"):
    flat = {}
    for k, v in nested.items():
        flat.update({k + sep + kk: vv for kk, vv in flatten_dict(v).items()} if isinstance(v, dict) else {k: v})
    return flat


class PPOTrainer:
    def __init__(self, model, ref_model, optimizer):
        self.model, self.ref_model, self.optimizer = model, ref_model, optimizer
        self.kl_ctl, self.running, self.current_step = AdaptiveKLController(0.2, 0.05, 100), RunningMoments(), 0

    def generate(self, queries, n=4):
        ids = queries
        with torch.no_grad():
            for _ in range(n):
                logits, _ = self.model.module(ids)
                ids = torch.cat([ids, torch.multinomial(logits[:, -1].softmax(-1), 1)], 1)
        return ids

    def logprobs(self, model, ids):
        logits, values = model(ids)
        lp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return lp[:, 2:], values[:, 2:-1]

    def step(self, ids, scores):
        scores_mean, scores_std = self.running.update(scores)
        scores = (scores / (self.running.std + 1e-8)).clamp(-2, 2)
        with torch.no_grad():
            old_lp, old_v = self.logprobs(self.model.module, ids)
            ref_lp, _ = self.logprobs(self.ref_model, ids)
        kl = old_lp - ref_lp
        rewards = -self.kl_ctl.value * kl
        rewards[:, -1] += scores
        returns = rewards.flip(1).cumsum(1).flip(1)
        adv = returns - old_v
        all_stats = []
        for _ in range(2):
            for inds in np.random.permutation(len(ids)).reshape(2, -1):
                lp, v = self.logprobs(self.model, ids[inds])
                ratio = torch.exp(lp - old_lp[inds])
                pg = torch.max(-adv[inds] * ratio, -adv[inds] * ratio.clamp(0.8, 1.2)).mean()
                vf = 0.5 * ((v - returns[inds]) ** 2).mean()
                self.optimizer.zero_grad()
                (pg + 0.1 * vf).backward()
                self.optimizer.step()
                all_stats.append(
                    flatten_dict({"loss": {"policy": pg.item(), "value": vf.item()}, "ratio": ratio.mean().item()})
                )
        stats = {k: sum(s[k] for s in all_stats) / len(all_stats) for k in all_stats[0]}
        mean_kl = kl.sum(1).mean()
        dist.all_reduce(mean_kl)
        self.kl_ctl.update(mean_kl.item() / dist.get_world_size(), len(ids))
        self.current_step += 1
        return {**stats, "kl_coef": float(self.kl_ctl.value), "scores": [scores_mean, scores_std]}


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(3)
    policy = PolicyWithValue()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    trainer = PPOTrainer(DDP(policy), reference, optim.Adam(policy.parameters(), lr=3e-3))
    training = relight.Training(
        model={"policy": trainer.model, "ref": reference},
        optimizer=trainer.optimizer,
        data=lambda n: torch.randint(0, 12, (8, 3)),
    )
    logs = []
    for step in training.steps(until=12):
        with step as queries:
            ids = trainer.generate(queries)
            scores = (ids[:, 3:] % 3 == 0).float().sum(1)
            logs.append(trainer.step(ids, scores))
        print({k: v for k, v in logs[-1].items() if k != "scores"})
    r = trainer.running
    finish(
        job, model=trainer.model, opt=trainer.optimizer, kl=float(trainer.kl_ctl.value), moments=[r.mean, r.std, r.var, r.count],
        step=trainer.current_step,
    )  # fmt: skip
