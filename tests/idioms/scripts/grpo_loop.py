"""GRPO in one file: groups of completions, several updates on one rollout, a reference that is set anew, adaptive KL."""

# ranks: 2
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AdaptiveKLController:
    def __init__(self, init_kl_coef, target, horizon):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current, n_steps):
        error = max(min(current / self.target - 1, 0.2), -0.2)
        self.value *= 1 + error * n_steps / self.horizon


@dataclass
class Rollout:
    tokens: torch.Tensor
    old_logp: torch.Tensor
    ref_logp: torch.Tensor
    advantage: torch.Tensor


class LM(nn.Module):
    def __init__(self, vocab=11, d=16):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(vocab, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, vocab)
        self.cache = None

    def forward(self, ids, use_cache=False):
        out, state = self.rnn(self.embed(ids), self.cache if use_cache else None)
        if use_cache:
            self.cache = state
        return self.head(out)


def logp_of(model, ids):
    return F.log_softmax(model(ids[:, :-1]), -1).gather(2, ids[:, 1:, None]).squeeze(2)


class GRPOTrainer:
    num_iterations, group, beta2 = 2, 4, 0.2

    def __init__(self, job):
        torch.manual_seed(4)
        self.policy = LM()
        self.ref = copy.deepcopy(self.policy).eval().requires_grad_(False)
        self.model = DDP(self.policy)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.kl = AdaptiveKLController(0.05, 0.02, 20)
        self._buffered, self._step, self.metrics = None, 0, {"kl": [], "reward": []}
        self.training = relight.Training(
            model={"policy": self.model, "ref": self.ref},
            optimizer=self.optim,
            data=lambda n: torch.randint(0, 11, (3, 2)),
        )

    @torch.no_grad()
    def generate(self, prompts):
        ids = prompts.repeat_interleave(self.group, 0)
        self.policy.cache = None
        logits = self.policy(ids, use_cache=True)[:, -1]
        for _ in range(5):
            nxt = torch.multinomial(logits.softmax(-1), 1)
            ids = torch.cat([ids, nxt], 1)
            logits = self.policy(nxt, use_cache=True)[:, -1]
        return ids

    @torch.no_grad()
    def rollout(self, prompts):
        ids = self.generate(prompts)
        reward = (ids[:, 2:] == ids[:, :1]).float().sum(1).view(-1, self.group)
        adv = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        self.metrics["reward"].append(reward.mean().item())
        return Rollout(ids, logp_of(self.policy, ids), logp_of(self.ref, ids), adv)

    def inputs(self, prompts):
        if self._step % self.num_iterations == 0:
            self._buffered = self.rollout(prompts)
        self._step += 1
        return self._buffered

    def compute_loss(self, r):
        logp = logp_of(self.model, r.tokens)
        ratio = (logp - r.old_logp).exp()
        per_token = torch.min(ratio * r.advantage, ratio.clamp(1 - self.beta2, 1 + self.beta2) * r.advantage)
        delta = r.ref_logp - logp
        kl = delta.exp() - delta - 1
        mean_kl = kl.mean().detach()
        torch.distributed.all_reduce(mean_kl)
        self.metrics["kl"].append(mean_kl.item() / 2)
        return -(per_token - self.kl.value * kl).mean()

    def train(self):
        for step in self.training.steps(until=16):
            with step as prompts:
                self.model.train()
                loss = self.compute_loss(self.inputs(prompts))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optim.step()
                self.optim.zero_grad()
                self.kl.update(self.metrics["kl"][-1], 1)
                if self._step % 6 == 0:
                    self.sync_ref()

    def sync_ref(self, alpha=0.6):
        for p, q in zip(self.ref.parameters(), self.policy.parameters()):
            p.data.mul_(1 - alpha).add_(q.data, alpha=alpha)


if __name__ == "__main__":
    job = relight.init()
    trainer = GRPOTrainer(job)
    trainer.train()
    finish(
        job,
        policy=trainer.model,
        ref=trainer.ref,
        optim=trainer.optim,
        kl=trainer.kl.value,
        metrics=trainer.metrics,
        tokens=trainer._buffered.tokens,
        old=trainer._buffered.old_logp,
    )
