"""timm's distribute_bn: running statistics are averaged over ranks at the end of each epoch."""

# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def distribute_bn(model, world_size):
    for name, buffer in model.named_buffers(recurse=True):
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
            buffer /= float(world_size)


def main():
    job = relight.init()
    torch.manual_seed(73)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.005, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 1, 8, 8))
    eval_loss, last = 0.0, None
    for step in training.steps(until=15):
        with step as x:
            loss = F.cross_entropy(model(x), x.flatten(1)[:, :3].argmax(1), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = loss.detach()
            if (step.number + 1) % 5 == 0:
                distribute_bn(net, dist.get_world_size())
                net.eval()
                with torch.no_grad():
                    eval_loss = net(torch.ones(2, 1, 8, 8)).sum().item()
                net.train()
    finish(job, model=model, optimizer=optimizer, eval_loss=eval_loss, last=last)


if __name__ == "__main__":
    main()
