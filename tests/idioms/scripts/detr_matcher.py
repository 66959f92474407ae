"""DETR: a criterion module with a matcher, losses of each layer, the number of boxes of all ranks, groups of parameters,
stdout as lines of JSON in a log file."""

# ranks: 2
import itertools
import json
import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


class Matcher(nn.Module):
    @torch.no_grad()
    def forward(self, outputs, targets):
        indices = []
        for logits, boxes, t in zip(outputs["pred_logits"], outputs["pred_boxes"], targets):
            cost = torch.cdist(boxes, t["boxes"], p=1) - logits.softmax(-1)[:, t["labels"]]
            n = len(t["labels"])
            best = min(itertools.permutations(range(len(boxes)), n), key=lambda p: cost[list(p), range(n)].sum().item())
            indices.append((torch.as_tensor(best, dtype=torch.int64), torch.arange(n)))
        return indices


class SetCriterion(nn.Module):
    def __init__(self, num_classes, matcher, weight_dict, eos_coef=0.1):
        super().__init__()
        self.num_classes, self.matcher, self.weight_dict = num_classes, matcher, weight_dict
        empty_weight = torch.ones(num_classes + 1)
        empty_weight[-1] = eos_coef
        self.register_buffer("empty_weight", empty_weight)

    def get_loss(self, outputs, targets, num_boxes, suffix=""):
        indices = self.matcher(outputs, targets)
        batch = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
        src = torch.cat([src for src, _ in indices])
        classes = torch.full(outputs["pred_logits"].shape[:2], self.num_classes)
        classes[batch, src] = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices)])
        boxes = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices)])
        ce = nn.functional.cross_entropy(outputs["pred_logits"].transpose(1, 2), classes, self.empty_weight)
        l1 = nn.functional.l1_loss(outputs["pred_boxes"][batch, src], boxes, reduction="none").sum() / num_boxes
        return {"loss_ce" + suffix: ce, "loss_bbox" + suffix: l1}

    def forward(self, outputs, targets):
        num_boxes = torch.as_tensor([sum(len(t["labels"]) for t in targets)], dtype=torch.float)
        dist.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / dist.get_world_size(), min=1).item()
        losses = self.get_loss({k: v for k, v in outputs.items() if k != "aux_outputs"}, targets, num_boxes)
        for i, aux in enumerate(outputs["aux_outputs"]):
            losses.update(self.get_loss(aux, targets, num_boxes, f"_{i}"))
        return losses


class Detr(nn.Module):
    def __init__(self, num_classes=4, num_queries=4, layers=2):
        super().__init__()
        self.backbone = nn.Conv2d(3, 16, 3, stride=2)
        self.query_embed = nn.Embedding(num_queries, 16)
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList([layer, nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True)])
        self.class_embed, self.bbox_embed = nn.Linear(16, num_classes + 1), nn.Linear(16, 4)

    def forward(self, x):
        memory = self.backbone(x).flatten(2).transpose(1, 2)
        hs = self.query_embed.weight.expand(len(x), -1, -1)
        outs = []
        for layer in self.layers:
            hs = layer(hs, memory)
            outs.append({"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()})
        return {**outs[-1], "aux_outputs": outs[:-1]}


class Scenes(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        n = 1 + i % 3
        return torch.randn(3, 7, 7), {"labels": torch.arange(n) % 4, "boxes": torch.rand(n, 4)}


def collate_fn(batch):
    batch = list(zip(*batch))
    batch[0] = torch.stack(batch[0])
    return tuple(batch)


def main(epochs=3, clip_max_norm=0.1):
    job = relight.init()
    torch.manual_seed(42 + job.rank)
    weight_dict = {"loss_ce": 1, "loss_bbox": 5}
    weight_dict.update({k + "_0": v for k, v in list(weight_dict.items())})
    criterion = SetCriterion(4, Matcher(), weight_dict)
    net = Detr()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in net.named_parameters() if "backbone" not in n]},
            {"params": [p for n, p in net.named_parameters() if "backbone" in n], "lr": 1e-4},
        ],
        lr=1e-3,
    )
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    dataset = Scenes()
    sampler = BatchSampler(DistributedSampler(dataset, job.world_size, job.rank), 2, drop_last=True)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=lr_scheduler, data=loader)
    model.train()
    criterion.train()
    stats = {}
    for step in training.steps(until=epochs * len(loader)):
        with step as (samples, targets):
            loss_dict = criterion(model(samples), targets)
            losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)
            with torch.no_grad():
                reduced = torch.stack([loss_dict[k] for k in sorted(loss_dict)])
                dist.all_reduce(reduced)
            loss_value = reduced.sum().item()
            if not math.isfinite(loss_value):
                print(f"Loss is {loss_value}, stopping training")
                sys.exit(1)
            optimizer.zero_grad()
            losses.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_max_norm)
            optimizer.step()
            stats["loss"] = stats.get("loss", 0.0) + loss_value
            if (step.number + 1) % len(loader) == 0:
                lr_scheduler.step()
        if step.committed and (step.number + 1) % len(loader) == 0 and job.rank == 0:
            with open("log.txt", "a") as f:
                f.write(json.dumps({**{f"train_{k}": v for k, v in stats.items()}, "epoch": step.epoch}) + "\n")
    finish(job, model=net, optimizer=optimizer, stats=stats)


if __name__ == "__main__":
    main()
