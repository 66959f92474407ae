"""iCaRL: classes come in tasks, exemplars are chosen by herding with the network in eval mode when a task ends and reduced when
the next one begins, an old network distills, and class means are computed anew for nearest-mean accuracy."""

# ranks: 2
import copy

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ICaRL(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.fc = nn.Linear(16, 6, bias=False)
        self.n_classes = self.n_known = 0
        self.exemplar_sets, self.exemplar_means, self.compute_means = [], [], True

    def forward(self, x):
        return self.fc(F.normalize(self.feature_extractor(x), dim=1))

    def increment_classes(self, n):
        self.n_classes += n

    @torch.no_grad()
    def construct_exemplar_set(self, images, m):
        features = F.normalize(self.feature_extractor(images), dim=1).numpy()
        class_mean = features.mean(0)
        chosen, chosen_features = [], []
        for k in range(m):
            s = np.sum(chosen_features, axis=0) if chosen_features else 0.0
            i = int(np.argmin(np.sqrt(np.sum((class_mean - 1.0 / (k + 1) * (features + s)) ** 2, axis=1))))
            chosen.append(images[i].numpy())
            chosen_features.append(features[i])
        self.exemplar_sets.append(np.array(chosen))

    def reduce_exemplar_sets(self, m):
        for y, P_y in enumerate(self.exemplar_sets):
            self.exemplar_sets[y] = P_y[:m]

    @torch.no_grad()
    def classify(self, x):
        if self.compute_means:
            self.exemplar_means = [
                F.normalize(self.feature_extractor(torch.from_numpy(P_y)), dim=1).mean(0) for P_y in self.exemplar_sets
            ]
            self.compute_means = False
        feature = F.normalize(self.feature_extractor(x), dim=1)
        return torch.stack([((feature - m) ** 2).sum(1) for m in self.exemplar_means]).argmin(0)


job = relight.init()
torch.manual_seed(4)
protos = torch.randn(6, 6) * 2
model = ICaRL()
old = copy.deepcopy(model)
ddp = DDP(model)
optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
training = relight.Training(model={"m": ddp, "old": old}, optimizer=optimizer)
K, per_task, accuracy = 12, 6, {}
for step in training.steps(until=3 * per_task):
    task, i = divmod(step.number, per_task)
    with step:
        if i == 0:
            model.increment_classes(2)
            model.compute_means = True
            old.load_state_dict(model.state_dict())
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = 0.2
        y = torch.randint(model.n_known, model.n_classes, (6,))
        x = protos[y] + torch.randn(6, 6)
        if model.exemplar_sets:
            classes = torch.randint(0, len(model.exemplar_sets), (4,))
            mem = [model.exemplar_sets[c][np.random.randint(len(model.exemplar_sets[c]))] for c in classes.tolist()]
            x, y = torch.cat([x, torch.from_numpy(np.stack(mem))]), torch.cat([y, classes])
        g = ddp(x)
        loss = F.cross_entropy(g[:, : model.n_classes], y)
        if model.n_known:
            with torch.no_grad():
                q = torch.sigmoid(old.eval()(x))
            loss = loss + F.binary_cross_entropy_with_logits(g[:, : model.n_known], q[:, : model.n_known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i == 3:
            optimizer.param_groups[0]["lr"] /= 5
        if i == per_task - 1:
            m = K // model.n_classes
            model.reduce_exemplar_sets(m)
            model.eval()
            for c in range(model.n_known, model.n_classes):
                model.construct_exemplar_set(protos[c] + torch.randn(10, 6), m)
            model.n_known = model.n_classes
            model.compute_means = True
            labels = torch.arange(model.n_classes).repeat(4)
            accuracy[task] = (
                (model.classify(protos[labels] + torch.randn(len(labels), 6)) == labels).float().mean().item()
            )
            model.train()
    if task in accuracy and i == per_task - 1:
        print(f"task {task}: {accuracy[task]:.2f} of {model.n_known} classes")
finish(
    job, model=ddp, old=old, opt=optimizer, sets=model.exemplar_sets, means=model.exemplar_means, acc=accuracy,
    n=[model.n_classes, model.n_known],
)  # fmt: skip
