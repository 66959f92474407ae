"""A training loop that finds its own micro batch: a RuntimeError "out of memory" halves it (a global), the step is tried again from
its first micro batch by recursion, every so often it dares to double; a no_sync context for all but the last."""

# ranks: 2
import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

micro_batch = 16
ooms = []
LIMIT = {"now": 16}


def should_reduce(exception):
    return isinstance(exception, RuntimeError) and "out of memory" in exception.args[0]


def find_executable_batch_size(function):
    @functools.wraps(function)
    def decorator(*args, **kwargs):
        global micro_batch
        while True:
            if micro_batch == 0:
                raise RuntimeError("No executable batch size found, reached zero.")
            try:
                return function(micro_batch, *args, **kwargs)
            except Exception as e:
                if not should_reduce(e):
                    raise
                ooms.append(micro_batch)
                micro_batch //= 2

    return decorator


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.norm, self.l2 = nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Linear(20, 1)

    def forward(self, x):
        if len(x) > LIMIT["now"]:
            raise RuntimeError("out of memory: tried to allocate 2.00 GiB")
        return self.l2(F.relu(self.norm(self.l1(x))))


@find_executable_batch_size
def forward_backward(size, model, optimizer, x):
    optimizer.zero_grad()
    chunks, total = x.split(size), 0.0
    for i, chunk in enumerate(chunks):
        context = model.no_sync if i < len(chunks) - 1 else contextlib.nullcontext
        with context():
            loss = F.mse_loss(model(chunk), chunk.prod(1, keepdim=True)) * len(chunk) / len(x)
            loss.backward()
        total += loss.item()
    return total


job = relight.init()
torch.manual_seed(2)
model = DDP(Net(), broadcast_buffers=False)
optimizer = optim.Adam(model.parameters(), lr=0.01)
training = relight.Training(model=model, optimizer=optimizer)
good, history = 0, []
for step in training.steps(until=20):
    with step:
        LIMIT["now"] = 16 if step.number % 7 < 3 else 6
        loss = forward_backward(model, optimizer, torch.randn(16, 6))
        optimizer.step()
        good = good + 1 if not ooms or ooms[-1] != micro_batch * 2 else good
        if good and good % 5 == 0 and micro_batch < 16:
            micro_batch *= 2
        history.append((micro_batch, round(loss, 5)))
    print(step.number, micro_batch, len(ooms))
finish(job, model=model, opt=optimizer, micro=micro_batch, ooms=ooms, good=good, history=history)
