"""A profiler with a schedule around the loop, anomaly detection in some steps, a signal handler that asks for a stop."""

import signal

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import relight
from tests.idioms.digest import finish

stop_requested = False
traces = []


def on_usr1(signum, frame):
    global stop_requested
    stop_requested = True


def main():
    job = relight.init()
    signal.signal(signal.SIGUSR2, on_usr1)
    torch.manual_seed(47 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    )
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=2, warmup=1, active=2, repeat=2),
        on_trace_ready=lambda p: traces.append(len(p.key_averages())),
    ) as prof:
        for step in training.steps(until=14):
            with step as (x, y):
                if stop_requested:
                    break
                with record_function("forward"), torch.autograd.set_detect_anomaly(step.number % 3 == 0):
                    loss = F.cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
            prof.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
