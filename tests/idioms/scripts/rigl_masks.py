"""RigL: sparse training with masks that drop the smallest weights and grow where gradients of all ranks are largest."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class RigLScheduler:
    def __init__(self, model, optimizer, dense_allocation=0.4, delta=4, alpha=0.3, t_end=16):
        self.optimizer, self.delta, self.alpha, self.t_end = optimizer, delta, alpha, t_end
        self.W = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        self.backward_masks = []
        self.step_count = self.rigl_steps = 0
        for w in self.W:
            mask = torch.zeros(w.numel())
            mask[torch.randperm(w.numel())[: int(dense_allocation * w.numel())]] = 1
            self.backward_masks.append(mask.view_as(w))
        self.apply_mask_to_weights()

    @torch.no_grad()
    def apply_mask_to_weights(self):
        for w, mask in zip(self.W, self.backward_masks):
            w *= mask

    @torch.no_grad()
    def apply_mask_to_gradients(self):
        for w, mask in zip(self.W, self.backward_masks):
            w.grad *= mask

    @torch.no_grad()
    def reset_momentum(self):
        for w, mask in zip(self.W, self.backward_masks):
            buf = self.optimizer.state[w].get("momentum_buffer")
            if buf is not None:
                buf *= mask

    def __call__(self):
        self.step_count += 1
        if self.step_count % self.delta == 0 and self.step_count < self.t_end:
            self._rigl_step()
            self.rigl_steps += 1
            return False
        return True

    @torch.no_grad()
    def _rigl_step(self):
        drop = self.alpha * (1 - self.step_count / self.t_end)
        for i, w in enumerate(self.W):
            mask = self.backward_masks[i]
            grow = w.grad.abs().clone()
            dist.all_reduce(grow)
            n_ones = int(mask.sum())
            n_prune = int(n_ones * drop)
            score = torch.where(mask > 0, w.abs(), torch.full_like(w, -1.0)).flatten()
            keep = torch.zeros_like(score)
            keep[score.topk(n_ones - n_prune).indices] = 1
            grow = torch.where(keep.view_as(w) > 0, torch.full_like(w, -1.0), grow).flatten()
            keep[grow.topk(n_prune).indices] = 1
            new = keep.view_as(w)
            w.copy_(torch.where((new > 0) & (mask == 0), torch.zeros_like(w), w))
            self.backward_masks[i] = new
        self.reset_momentum()
        self.apply_mask_to_weights()


job = relight.init()
torch.manual_seed(36)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
pruner = RigLScheduler(model.module, optimizer)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 8))
for step in training.steps(until=18):
    with step as x:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        if pruner():
            pruner.apply_mask_to_gradients()
            optimizer.step()
            pruner.reset_momentum()
            pruner.apply_mask_to_weights()
finish(job, model=model, optimizer=optimizer, masks=pruner.backward_masks, n=pruner.rigl_steps)
