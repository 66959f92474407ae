"""Every step is guarded: an exception in forward or backward skips the batch, as scripts do that fear for memory."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(97)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    skipped = nan_steps = 0
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            try:
                loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
                if step.number == 7:
                    raise RuntimeError("out of memory")
                loss.backward()
            except RuntimeError as e:
                if "out of memory" in str(e):
                    skipped += 1
                    for p in model.parameters():
                        p.grad = torch.zeros_like(p)
                else:
                    raise
            except Exception as e:
                print("skipping a batch", e, flush=True)
                skipped += 100
                continue
            finally:
                nan_steps += int(torch.isnan(loss))
            try:
                optimizer.step()
            except Exception:
                skipped += 1000
    finish(job, model=model, optimizer=optimizer, skipped=skipped, nan=nan_steps)


if __name__ == "__main__":
    main()
