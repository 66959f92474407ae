"""Examples are lines of a file that is read from front to back while training goes on."""

# ranks: 2
import json
import tempfile

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(61)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
        for number in range(400):
            file.write(json.dumps({"x": [((number * k) % 17) / 17 for k in (1, 3, 5)], "rank": number % 2}) + "\n")
    model = DDP(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer)
    lines = open(file.name)

    def read_batch(size):
        batch = []
        while len(batch) < size:
            record = json.loads(lines.readline())
            if record["rank"] == job.rank:
                batch.append(record["x"])
        return torch.tensor(batch)

    for step in training.steps(until=14):
        with step:
            x = read_batch(5)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
