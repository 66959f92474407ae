"""torchvision's detection engine: a dict of losses, warm-up of the first epoch's iterations, groups by aspect ratio, sizes
drawn in the transform, images of many shapes."""

# ranks: 2
import bisect
import random
from collections import defaultdict
from itertools import chain, repeat

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


class GroupedBatchSampler(BatchSampler):
    def __init__(self, sampler, group_ids, batch_size):
        self.sampler, self.group_ids, self.batch_size = sampler, group_ids, batch_size

    def __iter__(self):
        buffer_per_group = defaultdict(list)
        samples_per_group = defaultdict(list)
        num_batches = 0
        for idx in self.sampler:
            group_id = self.group_ids[idx]
            buffer_per_group[group_id].append(idx)
            samples_per_group[group_id].append(idx)
            if len(buffer_per_group[group_id]) == self.batch_size:
                yield buffer_per_group[group_id]
                num_batches += 1
                del buffer_per_group[group_id]
        num_remaining = len(self) - num_batches
        if num_remaining > 0:
            for group_id, _ in sorted(buffer_per_group.items(), key=lambda x: len(x[1]), reverse=True):
                remaining = self.batch_size - len(buffer_per_group[group_id])
                samples = list(chain.from_iterable(repeat(samples_per_group[group_id], remaining)))[:remaining]
                buffer_per_group[group_id].extend(samples)
                yield buffer_per_group[group_id]
                num_remaining -= 1
                if num_remaining == 0:
                    break

    def __len__(self):
        return len(self.sampler) // self.batch_size


class Boxes(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.ratios = (torch.rand(48, generator=g) + 0.5).tolist()
        self.boxes = torch.rand(48, 4, generator=g)

    def __len__(self):
        return 48

    def __getitem__(self, i):
        image = torch.full((3, 8, int(8 * self.ratios[i])), self.ratios[i])
        target = {"boxes": self.boxes[i][None], "labels": torch.tensor([i % 3]), "image_id": i}
        if random.random() < 0.5:
            image = image.flip(-1)
            target["boxes"] = 1 - target["boxes"]
        return image, target


class RCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.min_size = (6, 8, 10)
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.rpn, self.box_head, self.cls_head = nn.Linear(32, 4), nn.Linear(32, 4), nn.Linear(32, 3)

    def forward(self, images, targets=None):
        size = self.min_size[int(torch.empty(1).uniform_(0.0, float(len(self.min_size))).item())]
        images = [nn.functional.interpolate(i[None], size=(size, size)) for i in images]
        features = self.backbone(torch.cat(images))
        if not self.training:
            return [{"boxes": b, "scores": s} for b, s in zip(self.box_head(features), self.cls_head(features))]
        boxes = torch.cat([t["boxes"] for t in targets])
        labels = torch.cat([t["labels"] for t in targets])
        return {
            "loss_classifier": nn.functional.cross_entropy(self.cls_head(features), labels),
            "loss_box_reg": nn.functional.smooth_l1_loss(self.box_head(features), boxes),
            "loss_rpn_box_reg": nn.functional.l1_loss(self.rpn(features), boxes),
        }


def reduce_dict(input_dict):
    with torch.inference_mode():
        names = sorted(input_dict)
        values = torch.stack([input_dict[k] for k in names], dim=0)
        dist.all_reduce(values)
        values /= dist.get_world_size()
        return dict(zip(names, values))


def collate_fn(batch):
    return tuple(zip(*batch))


def main(epochs=3):
    job = relight.init()
    torch.manual_seed(0)
    dataset = Boxes()
    bins = [0.75, 1.0, 1.25]
    group_ids = [bisect.bisect_right(bins, r) for r in dataset.ratios]
    sampler = DistributedSampler(dataset, job.world_size, job.rank)
    loader = DataLoader(dataset, batch_sampler=GroupedBatchSampler(sampler, group_ids, 3), collate_fn=collate_fn)
    model = nn.parallel.DistributedDataParallel(RCNN())
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
    warmup_iters = min(1000, len(loader) - 1)
    warmup_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 1000, total_iters=warmup_iters)
    training = relight.Training(
        model=model, optimizer=optimizer, scheduler=[lr_scheduler, warmup_scheduler], data=loader
    )
    coco_results, history = {}, []
    for step in training.steps(until=epochs * len(loader)):
        with step as (images, targets):
            if step.number % len(loader) == 0 and step.number:
                model.eval()
                with torch.inference_mode():
                    outputs = model(images)
                coco_results.update({t["image_id"]: o["scores"].sum().item() for t, o in zip(targets, outputs)})
                model.train()
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())
            loss_dict_reduced = reduce_dict(loss_dict)
            loss_value = sum(loss for loss in loss_dict_reduced.values()).item()
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
            if step.epoch == 0:
                warmup_scheduler.step()
            if (step.number + 1) % len(loader) == 0:
                lr_scheduler.step()
            history.append(loss_value)
    finish(job, model=model, optimizer=optimizer, results=coco_results, history=history)


if __name__ == "__main__":
    main()
