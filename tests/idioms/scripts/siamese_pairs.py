"""pytorch/examples' siamese network: a dataset that groups examples and draws partners with NumPy and random in worker
processes, a module-level RandomState in collate, a learning rate by StepLR, metrics of a class by key."""

# ranks: 2
import random
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish

rng = np.random.RandomState(0)  # of this module, as imgaug and others have one


class APP_MATCHER(Dataset):
    def __init__(self, n=64):
        g = np.random.RandomState(1)
        self.data = g.rand(n, 1, 8, 8).astype(np.float32)
        self.targets = g.randint(0, 4, n)
        self.group_examples()

    def group_examples(self):
        self.grouped_examples = {i: np.where(self.targets == i)[0] for i in range(4)}

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        selected_class = random.randint(0, 3)
        indices = self.grouped_examples[selected_class]
        index_1 = indices[random.randint(0, len(indices) - 1)]
        if index % 2 == 0:
            index_2 = indices[np.random.randint(len(indices))]
            target = torch.tensor(1, dtype=torch.float)
        else:
            other = (selected_class + random.randint(1, 3)) % 4
            index_2 = self.grouped_examples[other][random.randint(0, len(self.grouped_examples[other]) - 1)]
            target = torch.tensor(0, dtype=torch.float)
        return torch.from_numpy(self.data[index_1]), torch.from_numpy(self.data[index_2]), target


def collate(batch):
    images_1, images_2, targets = (torch.stack(part) for part in zip(*batch))
    if rng.rand() < 0.5:
        images_1 = images_1 + torch.from_numpy(rng.normal(0, 0.1, images_1.shape).astype(np.float32))
    angle = rng.choice([0, 1, 2, 3])
    return torch.rot90(images_1, int(angle), (2, 3)), images_2, targets


def worker_init_fn(worker_id):
    np.random.seed((torch.initial_seed() + worker_id) % 2**32)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.resnet = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(144, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))
        self.sigmoid = nn.Sigmoid()
        self.resnet.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, input1, input2):
        return self.sigmoid(self.fc(torch.cat((self.resnet(input1), self.resnet(input2)), 1)))


class Metrics:
    _registry = defaultdict(list)

    @classmethod
    def log(cls, **values):
        for key, value in values.items():
            cls._registry[key].append(value)

    @classmethod
    def mean(cls, key, window=5):
        return float(np.mean(cls._registry[key][-window:]))


def main(epochs=4):
    job = relight.init()
    torch.manual_seed(1)
    dataset = APP_MATCHER()
    sampler = DistributedSampler(dataset, job.world_size, job.rank)
    loader = DataLoader(dataset, 8, sampler=sampler, num_workers=2, collate_fn=collate, worker_init_fn=worker_init_fn)
    model = DDP(SiameseNetwork())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    criterion = nn.BCELoss()
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step in training.steps(until=epochs * len(loader)):
        with step as (images_1, images_2, targets):
            optimizer.zero_grad()
            loss = criterion(model(images_1, images_2).squeeze(), targets)
            if step.number > 3 and loss.item() > 1.05 * Metrics.mean("loss"):
                loss = loss * 0.5  # a batch that is harder than the last ones
            Metrics.log(loss=loss.item(), batch=step.number)
            loss.backward()
            optimizer.step()
            if (step.number + 1) % len(loader) == 0:
                scheduler.step()
    finish(job, model=model, optimizer=optimizer, metrics=dict(Metrics._registry))


if __name__ == "__main__":
    main()
