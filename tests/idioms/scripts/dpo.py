"""Direct preference optimization: a frozen reference model under no_grad, log-probabilities of pairs, accumulation by hand
with no_sync, a half-precision communication hook, one gradient norm over all parameters."""

import contextlib
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class TinyLM(nn.Module):
    def __init__(self, vocab=16, dim=10):
        super().__init__()
        self.emb, self.rnn, self.out = (
            nn.Embedding(vocab, dim),
            nn.GRU(dim, dim, batch_first=True),
            nn.Linear(dim, vocab),
        )

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def logps(model, ids):
    logits = model(ids)[:, :-1].log_softmax(-1)
    return logits.gather(2, ids[:, 1:, None]).squeeze(2).sum(1)


def dpo_loss(policy, reference, chosen, rejected, beta=0.3):
    both = torch.cat([chosen, rejected])
    pi_c, pi_r = logps(policy, both).chunk(2)
    with torch.no_grad():
        ref_c, ref_r = logps(reference, both).chunk(2)
    return -F.logsigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r))).mean()


def main():
    job = relight.init()
    torch.manual_seed(63)
    lm = TinyLM()
    reference = copy.deepcopy(lm).eval()
    policy = DDP(lm)
    policy.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)
    gradient_accumulation_steps = 2
    training = relight.Training(
        model=policy,
        optimizer=optimizer,
        data=lambda n: (torch.randint(0, 16, (3, 6)), torch.randint(0, 16, (3, 6))),
        accumulate=gradient_accumulation_steps,
    )
    for step in training.steps(until=14):
        with step as pairs:
            for i, (chosen, rejected) in enumerate(pairs):
                last = i == len(pairs) - 1
                with contextlib.nullcontext() if last else policy.no_sync():
                    (dpo_loss(policy, reference, chosen, rejected) / gradient_accumulation_steps).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finish(job, policy=policy, reference=reference, optimizer=optimizer)


if __name__ == "__main__":
    main()
