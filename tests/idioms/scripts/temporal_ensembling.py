"""Temporal ensembling: outputs of all samples kept in tensors by index, averaged with bias correction at the end of an epoch, a
ramp of the unsupervised weight, labels hidden by -1, rates and betas of Adam set in groups."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def ramp_up(epoch, max_epochs, max_val, mult):
    if epoch == 0:
        return 0.0
    if epoch >= max_epochs:
        return max_val
    return max_val * np.exp(mult * (1.0 - float(epoch) / max_epochs) ** 2)


def main(ntrain=48, n_classes=3, batch_size=8, alpha=0.6):
    job = relight.init()
    torch.manual_seed(0)
    rng = np.random.RandomState(0)
    x_all = torch.randn(ntrain, 6)
    y_all = torch.randint(0, n_classes, (ntrain,))
    y_all[torch.rand(ntrain) < 0.5] = -1
    mine = torch.arange(job.rank, ntrain, job.world_size)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.Dropout(0.3), nn.ReLU(), nn.Linear(24, n_classes)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99))
    training = relight.Training(model=model, optimizer=optimizer)
    per_epoch = len(mine) // batch_size
    Z = torch.zeros(ntrain, n_classes).float()
    z = torch.zeros(ntrain, n_classes).float()
    outputs = torch.zeros(ntrain, n_classes).float()
    losses, best_loss, epoch_losses, perm = [], 20.0, [], None
    for step in training.steps(until=6 * per_epoch):
        epoch, i = divmod(step.number, per_epoch)
        if i == 0:
            perm = rng.permutation(mine.numpy())
            w = torch.tensor(ramp_up(epoch, 4, 3.0, -5.0) * 0.5)
        with step:
            idx = torch.as_tensor(perm[i * batch_size : (i + 1) * batch_size])
            images, labels = x_all[idx], y_all[idx]
            optimizer.zero_grad()
            out = model(images + 0.1 * torch.randn_like(images))
            zcomp = z[idx]
            sup = F.cross_entropy(out, labels, ignore_index=-1) if (labels >= 0).any() else out.sum() * 0
            loss = sup + w * ((F.softmax(out, dim=1) - zcomp) ** 2).sum() / out.numel()
            outputs[idx] = out.data.clone()
            epoch_losses.append(loss.item())
            loss.backward()
            optimizer.step()
        if i == per_epoch - 1:
            eloss = np.mean(epoch_losses)
            losses.append(eloss)
            print(f"Epoch [{epoch + 1}], Loss: {eloss:.6f}")
            Z = alpha * Z + (1.0 - alpha) * F.softmax(outputs, dim=1)
            z = Z * (1.0 / (1.0 - alpha ** (epoch + 1)))
            if eloss < best_loss:
                best_loss = eloss
            epoch_losses = []
    finish(job, model=model, opt=optimizer, Z=Z, z=z, losses=[float(v) for v in losses], best=float(best_loss))


if __name__ == "__main__":
    main()
