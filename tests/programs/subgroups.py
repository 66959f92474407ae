"""Process groups chosen before the loop and in it, by the rank of the moment, as scripts do."""

import argparse
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import relight


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--loop", action="store_true", help="call a collective on every group, also as no member")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = relight.init()
    job.on_rank_change(lambda rank: print(f"took rank {rank}, {dist.get_rank()}, {os.environ['RANK']}", flush=True))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3], backend="gloo")]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = next(group for group in across if group != dist.GroupMember.NON_GROUP_MEMBER)
    half, halves = dist.new_subgroups(2)
    told: list[object] = [None] * job.world_size
    dist.all_gather_object(told, "setup")  # a standby has its own
    assert told[-1] == "setup"
    words = ["own"]
    dist.broadcast_object_list(words, src=0)
    assert words == ["own"]
    dist.monitored_barrier(pairs[job.rank // 2], timeout=timedelta(seconds=60))
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    pairs[job.rank // 2].monitored_barrier()
    made_for_now = dist.new_group(backend="gloo", timeout=timedelta(days=10000))
    made_for_now.monitored_barrier()
    dist.destroy_process_group(made_for_now)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer)
    warnings.simplefilter("ignore")  # of c10d, that it skips an operation
    for step in training.steps(until=options.steps):
        with step:
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step.number + job.rank))
            model(batch).square().mean().backward()
            gradient = model.weight.grad
            assert gradient is not None
            value = torch.tensor(float(job.rank + 1))
            if options.loop:
                for weight, group in enumerate((*pairs, *across)):
                    dist.all_reduce(value, group=group)
                    value += weight
            else:
                dist.all_reduce(value, group=pairs[job.rank // 2])
                value *= 1 + dist.get_rank(pairs[job.rank // 2])
                dist.all_reduce(value, group=mine)
                value += 10 * dist.get_rank(mine) + sum(dist.get_process_group_ranks(mine))
                dist.all_reduce(value, group=half)
                value *= 1 + dist.get_rank(halves[job.rank // 2])
                if step.number == 4:
                    dist.monitored_barrier(pairs[job.rank // 2])
            gradient += value
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
