"""A port of pytorch/examples' imagenet/main.py, written afresh and small, for torchrun.

imagenet_relight.py is its port.

torchrun --nproc-per-node 2 examples/ports/imagenet_torchrun.py

Like the original with --dummy it takes made-up images: there the class is to be found in the picture's stripes.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = 10


def main() -> None:
    options = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(options.seed)

    model = DDP(ResNet(options.width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=1e-4)
    train_set, val_set = Stripes(options.images, seed=1), Stripes(64, seed=2)
    sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(train_set, world_size, rank, drop_last=True)
    loader = DataLoader(train_set, options.batch_size, sampler=sampler, drop_last=True)
    scheduler = StepLR(optimizer, step_size=30 * len(loader), gamma=0.1)  # every 30 epochs

    first_epoch = 0
    if options.resume and Path(options.resume).exists():
        checkpoint = torch.load(options.resume, map_location=device)
        model.module.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        first_epoch = checkpoint["epoch"]

    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            loss = F.cross_entropy(model(images.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {validate(model.module, val_set, device):.2f}", flush=True)
            if options.resume:
                state = {"epoch": epoch + 1, "state_dict": model.module.state_dict()}
                state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
                torch.save(state, options.resume)
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=16)
    add("--images", type=int, default=512, help="to train on")
    add("--width", type=int, default=16, help="channels of the first stage")
    add("--lr", type=float, default=0.05)
    add("--seed", type=int, default=0)
    add("--resume", default="", help="where checkpoints are written, and the newest is read")
    return parser.parse_args()


@torch.no_grad()
def validate(model: nn.Module, images: Dataset[tuple[Tensor, int]], device: torch.device) -> float:
    """Share of images whose class is found. One rank does it alone."""
    model.eval()
    right = total = 0
    for pictures, target in DataLoader(images, 64):
        right += int((model(pictures.to(device)).argmax(1) == target.to(device)).sum())
        total += len(target)
    model.train()
    return right / total


class Stripes(Dataset[tuple[Tensor, int]]):
    """Pictures of 3 x 32 x 32: stripes, as many as the class says, under noise."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index % CLASSES
        stripes = torch.sin(torch.linspace(0, 6.28 * (label + 1), 32)).expand(3, 32, 32)
        return stripes + 0.3 * torch.randn(3, 32, 32, generator=generator), label


# --- model --------------------------------------------------------------------------------------------------------
class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        widths = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.stages = nn.Sequential(*[BasicBlock(*shape) for shape in widths])
        self.fc = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.stages(self.stem(x)).mean((2, 3)))
        return logits


if __name__ == "__main__":
    main()
