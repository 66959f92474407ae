"""Two networks change places: the worse one takes the weights of the better and is disturbed."""

# ranks: 2
import copy
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(53)
    nets = {"a": DDP(nn.Linear(5, 3)), "b": DDP(nn.Linear(5, 3))}
    opts = {k: torch.optim.SGD(n.parameters(), 0.1 if k == "a" else 0.02, momentum=0.9) for k, n in nets.items()}
    training = relight.Training(model=nets, optimizer=opts, data=lambda n: torch.randn(6, 5))
    leader, follower = "a", "b"
    history = defaultdict(list)
    for step in training.steps(until=15):
        with step as x:
            losses = {}
            for name in sorted(nets):
                opts[name].zero_grad()
                loss = (nets[name](x) - x[:, :3]).square().mean()
                loss.backward()
                value = loss.detach().clone()
                dist.all_reduce(value)
                losses[name] = value.item()
                opts[name].step()
                history[name].append(value.item())
            if step.number % 4 == 3:
                leader, follower = sorted(losses, key=losses.get)
                nets[follower].load_state_dict(nets[leader].state_dict())
                opts[follower].load_state_dict(copy.deepcopy(opts[leader].state_dict()))
                with torch.no_grad():
                    for i, p in enumerate(nets[follower].parameters()):
                        p.mul_(1 + 0.01 * (i + 1))
                nets, opts = dict(reversed(nets.items())), opts
    finish(job, a=nets["a"], b=nets["b"], oa=opts["a"], ob=opts["b"], leader=leader, history=dict(history))


if __name__ == "__main__":
    main()
