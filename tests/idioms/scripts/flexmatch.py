"""Thresholds of each class from a counter of what was ever chosen: FlexMatch."""

# ranks: 2
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(83)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    ema = {k: v.clone() for k, v in model.state_dict().items()}
    selected_label = torch.ones(50, dtype=torch.long) * -1
    classwise_acc = torch.zeros(4)
    ulb = torch.randn(50, 6, generator=torch.Generator().manual_seed(9 + job.rank))
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=16):
        with step as x:
            y = x[:, :4].argmax(1)
            idx = torch.randint(0, 50, (10,))
            pseudo_counter = Counter(selected_label.tolist())
            if max(pseudo_counter.values()) < 50:
                wo_negative_one = dict(pseudo_counter)
                wo_negative_one.pop(-1, None)
                for i in range(4):
                    classwise_acc[i] = pseudo_counter[i] / max(wo_negative_one.values())
            with torch.no_grad():
                max_probs, max_idx = model(ulb[idx]).softmax(-1).max(-1)
            mask = max_probs.ge(0.4 * (classwise_acc[max_idx] / (2.0 - classwise_acc[max_idx]))).float()
            select = max_probs.ge(0.35).long()
            if idx[select == 1].nelement() != 0:
                selected_label[idx[select == 1]] = max_idx[select == 1]
            loss = F.cross_entropy(model(x), y)
            loss = loss + (F.cross_entropy(model(ulb[idx] + 0.1), max_idx, reduction="none") * mask).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for k, v in model.state_dict().items():
                ema[k] = 0.9 * ema[k] + 0.1 * v
    finish(job, model=model, optimizer=optimizer, selected=selected_label, acc=classwise_acc, ema=ema)


if __name__ == "__main__":
    main()
