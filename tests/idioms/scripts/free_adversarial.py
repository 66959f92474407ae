"""Free adversarial training: one perturbation goes on from batch to batch, and is written by its own sign step."""

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish

EPSILON, REPEATS = 0.1, 3
global_noise_data = torch.zeros(4, 8)


def main():
    job = relight.init()
    torch.manual_seed(17 + job.rank)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(4, 8), torch.randint(0, 3, (4,)))
    )
    for step in training.steps(until=12):
        with step as (x, y):
            for _ in range(REPEATS):
                noise_batch = torch.autograd.Variable(global_noise_data[0 : x.size(0)], requires_grad=True)
                in1 = x + noise_batch
                in1.clamp_(-2.0, 2.0)
                loss = F.cross_entropy(model(in1), y)
                loss.backward()
                pert = EPSILON * torch.sign(noise_batch.grad)
                global_noise_data[0 : x.size(0)] += pert.data
                global_noise_data.clamp_(-EPSILON, EPSILON)
                optimizer.step()
                optimizer.zero_grad()
    finish(job, model=model, optimizer=optimizer, noise=global_noise_data)


if __name__ == "__main__":
    main()
