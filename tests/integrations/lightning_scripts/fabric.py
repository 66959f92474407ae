"""A loop of one's own with Fabric: its strategy, optimizer and loader wrappers, its reductions."""

import argparse
import hashlib

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import relight

parser = argparse.ArgumentParser()
parser.add_argument("--output")
options = parser.parse_args()
torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=2, strategy="relight", precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(1)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 16))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
data = TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
held_out = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))  # read in another order each time
training = relight.Training(model=model, optimizer=optimizer, data=loader, accumulate=2)
losses, found = [], []
for step in training.steps(until=12):
    with step as batches:
        if step.number % 3 == 1:
            with torch.no_grad():
                found += [float((model(x) - x).pow(2).mean()) for (x,), _ in zip(held_out, range(2), strict=False)]
        for number, (x,) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=number == 0):
                loss = (model(x) - x).pow(2).mean()
                fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
        optimizer.step()
        optimizer.zero_grad()
weights = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
digest = hashlib.sha256(weights + repr([losses, found]).encode()).hexdigest()[:16]
print(f"rank {fabric.global_rank}: {len(losses)} steps, digest {digest} zero {fabric.is_global_zero}", flush=True)
