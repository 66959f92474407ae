"""Cross-validation: a function trains each fold from scratch with a loop of its own, called in a loop over folds; the results are
collected in a dict, the best fold's weights kept."""

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

job = relight.init()


def reset_weights(m):
    for layer in m.children():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


def run_fold(fold, train_ids, val_ids):
    torch.manual_seed(42)
    network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    network.apply(reset_weights)
    network = DDP(network)
    optimizer = optim.Adam(network.parameters(), lr=0.01 * (fold + 1))
    ids = torch.as_tensor(train_ids)
    training = relight.Training(model=network, optimizer=optimizer)
    current_loss, correct = 0.0, 0
    for step in training.steps(until=6):
        with step:
            pick = ids[torch.randint(0, len(ids), (8,))]
            optimizer.zero_grad()
            loss = F.cross_entropy(network(X[pick]), Y[pick])
            loss.backward()
            optimizer.step()
        current_loss += loss.item()
        if step.number % 3 == 2:
            print("Loss after mini-batch %5d: %.3f" % (step.number + 1, current_loss / 3))
            current_loss = 0.0
    with torch.no_grad():
        correct = (network.module(X[val_ids]).argmax(1) == Y[val_ids]).sum().item()
    return 100.0 * correct / len(val_ids), copy.deepcopy(network.module.state_dict())


torch.manual_seed(7)
X, Y = torch.randn(60, 5), torch.randint(0, 2, (60,))
results, best = {}, None
folds = np.array_split(np.random.RandomState(0).permutation(60), 3)
for fold in range(3):
    val_ids = folds[fold]
    train_ids = np.concatenate([f for i, f in enumerate(folds) if i != fold])
    acc, weights = run_fold(fold, train_ids, val_ids)
    if not results or acc > max(results.values()):
        best = weights
    results[fold] = acc
print(f"Average: {sum(results.values()) / len(results)} %")
finish(job, results=results, best=best)
