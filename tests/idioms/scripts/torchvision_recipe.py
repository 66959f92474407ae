"""torchvision's classification recipe: repeated augmentation, MixUp and CutMix in collate, warm-up in a SequentialLR,
an EMA that is kept at the weights while the rate warms up."""

# ranks: 2
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import relight
from tests.idioms.digest import finish


class RASampler(torch.utils.data.Sampler):
    def __init__(self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, repetitions=3):
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.epoch = 0
        self.num_samples = int(math.ceil(len(self.dataset) * float(repetitions) / self.num_replicas))
        self.total_size = self.num_samples * self.num_replicas
        self.num_selected_samples = int(math.floor(len(self.dataset) // 16 * 16 / self.num_replicas))
        self.shuffle, self.seed, self.repetitions = shuffle, seed, repetitions

    def __iter__(self):
        if self.shuffle:
            g = torch.Generator()
            g.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(self.dataset), generator=g).tolist()
        else:
            indices = list(range(len(self.dataset)))
        indices = [ele for ele in indices for _ in range(self.repetitions)]
        indices += indices[: (self.total_size - len(indices))]
        indices = indices[self.rank : self.total_size : self.num_replicas]
        return iter(indices[: self.num_selected_samples])

    def __len__(self):
        return self.num_selected_samples

    def set_epoch(self, epoch):
        self.epoch = epoch


class RandomMixup(nn.Module):
    def __init__(self, num_classes, p=0.5, alpha=0.2):
        super().__init__()
        self.num_classes, self.p, self.alpha = num_classes, p, alpha

    def forward(self, batch, target):
        target = nn.functional.one_hot(target, self.num_classes).float()
        if torch.rand(1).item() >= self.p:
            return batch, target
        lam = float(torch._sample_dirichlet(torch.tensor([self.alpha, self.alpha]))[0])
        return batch * lam + batch.roll(1, 0) * (1 - lam), target * lam + target.roll(1, 0) * (1 - lam)


class RandomCutmix(RandomMixup):
    def forward(self, batch, target):
        target = nn.functional.one_hot(target, self.num_classes).float()
        if torch.rand(1).item() >= self.p:
            return batch, target
        r_x, r_y = torch.randint(8, (1,)).item(), torch.randint(8, (1,)).item()
        batch = batch.clone()
        batch[:, :, r_y : r_y + 3, r_x : r_x + 3] = batch.roll(1, 0)[:, :, r_y : r_y + 3, r_x : r_x + 3]
        return batch, target


class RandomChoice(nn.Module):
    def __init__(self, transforms):
        super().__init__()
        self.transforms = nn.ModuleList(transforms)

    def forward(self, *inputs):
        return self.transforms[int(torch.randint(len(self.transforms), (1,)))](*inputs)


class Images(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(80, 3, 8, 8, generator=g), torch.randint(5, (80,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i].flip(-1) if torch.rand(1) < 0.5 else self.x[i]
        return x, self.y[i]


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        def ema_avg(avg_model_param, model_param, num_averaged):
            return decay * avg_model_param + (1 - decay) * model_param

        super().__init__(model, None, ema_avg, use_buffers=True)


def main(epochs=5, warmup_epochs=2, ema_steps=2):
    job = relight.init()
    torch.manual_seed(0)
    dataset = Images()
    mixupcutmix = RandomChoice([RandomMixup(5), RandomCutmix(5)])

    def collate_fn(batch):
        return mixupcutmix(*default_collate(batch))

    train_sampler = RASampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=train_sampler, num_workers=2, collate_fn=collate_fn)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-5, nesterov=True)
    main_lr = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - warmup_epochs)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=warmup_epochs)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main_lr], milestones=[warmup_epochs])
    model_ema = ExponentialMovingAverage(net, decay=0.9)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, ema=model_ema, data=loader)
    for step in training.steps(until=epochs * len(loader)):
        i = step.number % len(loader)
        with step as (image, target):
            loss = criterion(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if i % ema_steps == 0:
                model_ema.update_parameters(net)
                if step.epoch < warmup_epochs:
                    model_ema.n_averaged.fill_(0)
            if i == len(loader) - 1:
                scheduler.step()
    finish(job, model=net, ema=model_ema, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
