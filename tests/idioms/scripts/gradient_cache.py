"""GradCache: representations first, without a graph, then again in chunks with the same draws."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class RandContext:
    def __init__(self):
        self.state = torch.get_rng_state()

    def __enter__(self):
        self.fork = torch.random.fork_rng(devices=[], enabled=True)
        self.fork.__enter__()
        torch.set_rng_state(self.state)

    def __exit__(self, *details):
        self.fork.__exit__(*details)
        self.fork = None


def main():
    job = relight.init()
    torch.manual_seed(23)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(12, 6))
    for step in training.steps(until=13):
        with step as x:
            optimizer.zero_grad()
            contexts, reps = [], []
            for chunk in x.split(4):
                contexts.append(RandContext())
                with torch.no_grad():
                    reps.append(model(chunk))
            cached = torch.cat(reps).requires_grad_()
            scores = cached @ cached.T
            loss = F.cross_entropy(scores, torch.arange(12).roll(1))
            loss.backward()
            chunks = list(zip(x.split(4), contexts, cached.grad.split(4), strict=True))
            for k, (chunk, context, grad) in enumerate(chunks):

                def forward():
                    with context:
                        y = model(chunk)
                    torch.dot(y.flatten(), grad.flatten()).backward()

                if k < len(chunks) - 1:
                    with model.no_sync():
                        forward()
                else:
                    forward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
