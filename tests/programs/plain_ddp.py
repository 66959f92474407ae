"""The training of train.py without relight, for torchrun: what its results are compared with."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.programs.train import Net, make_optimizers, save, zero_gradients


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--save", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(Net(64, 0.0, options.batchnorm))
    optimizers = make_optimizers(options.optimizer, model, groups=False)
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(96 * world_size, 16, generator=generator)
    labels = torch.randint(0, 4, (96 * world_size,), generator=generator)
    dataset = TensorDataset(data, labels)
    sampler: DistributedSampler[object] = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size=24, sampler=sampler)
    done = 0
    while done < options.steps:
        sampler.set_epoch(done // len(loader))
        for x, y in loader:
            if done == options.steps:
                break
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers.values():
                optimizer.step()
            zero_gradients(optimizers)
            done += 1
    weights = relight.digest_weights(relight.weights_of(model))
    save(f"{options.save}.{rank}", model, weights, **optimizers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
