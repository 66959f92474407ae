"""FixMatch in the shape of public code: two loaders, thresholds per class that adapt, and labels kept in a dict by index."""

from collections import Counter, defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(53)
    source = torch.Generator().manual_seed(9)
    labeled = TensorDataset(torch.randn(24, 6, generator=source), torch.randint(0, 3, (24,), generator=source))
    unlabeled = TensorDataset(torch.randn(60, 6, generator=source), torch.arange(60))
    loaders = {
        "labeled": DataLoader(labeled, 4, shuffle=True, drop_last=True),
        "unlabeled": DataLoader(unlabeled, 6, shuffle=True, drop_last=True),
    }
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=loaders["labeled"])
    selected_label = torch.full((60,), -1, dtype=torch.long)
    classwise_acc = torch.zeros(3)
    votes = defaultdict(Counter)
    for step in training.steps(until=18):
        picked = torch.randint(0, 60, (6,))
        with step as (x, y):
            ux, index = unlabeled.tensors[0][picked], picked
            counts = Counter(selected_label.tolist())
            if max(counts.values()) < 60:
                for c in range(3):
                    classwise_acc[c] = counts[c] / max(counts.values())
            logits = model(torch.cat([x, ux, ux + 0.1 * torch.randn_like(ux)]))
            weak, strong = logits[len(x) :].chunk(2)
            probs = weak.detach().softmax(-1)
            top, guess = probs.max(-1)
            mask = top.ge(0.5 * (classwise_acc[guess] / (2.0 - classwise_acc[guess])))
            selected_label[index[mask]] = guess[mask]
            for i, g in zip(index[mask].tolist(), guess[mask].tolist(), strict=True):
                votes[i][g] += 1
            target = torch.tensor([votes[i].most_common(1)[0][0] if votes[i] else 0 for i in index.tolist()])
            loss = (
                F.cross_entropy(logits[: len(x)], y) + (F.cross_entropy(strong, target, reduction="none") * mask).mean()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(
        job,
        model=model,
        optimizer=optimizer,
        selected=selected_label,
        acc=classwise_acc,
        votes={k: dict(v) for k, v in votes.items()},
    )


if __name__ == "__main__":
    main()
