"""XNOR-Net's BinOp: lists of weights found by walking the modules, saved, binarized before forward and restored before the
step, with gradients rewritten by hand; best accuracy as a global, a learning rate dropped at epochs in a list."""

# ranks: 2
import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class BinOp:
    def __init__(self, model):
        count_targets = 0
        for m in model.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                count_targets = count_targets + 1
        self.bin_range = numpy.linspace(1, count_targets - 2, count_targets - 2).astype("int").tolist()
        self.num_of_params = len(self.bin_range)
        self.saved_params, self.target_params, self.target_modules = [], [], []
        index = -1
        for m in model.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                index = index + 1
                if index in self.bin_range:
                    self.saved_params.append(m.weight.data.clone())
                    self.target_modules.append(m.weight)

    def binarization(self):
        for index in range(self.num_of_params):
            w = self.target_modules[index]
            w.data = w.data.sub(w.data.mean(1, keepdim=True)).clamp(-1.0, 1.0)
            self.saved_params[index].copy_(w.data)
            m = w.data.abs().mean(1, keepdim=True).expand(w.size())
            w.data = w.data.sign().mul(m)

    def restore(self):
        for index in range(self.num_of_params):
            self.target_modules[index].data.copy_(self.saved_params[index])

    def updateBinaryGradWeight(self):
        for index in range(self.num_of_params):
            weight = self.target_modules[index].data
            n = weight[0].nelement()
            m = weight.abs().mean(1, keepdim=True).expand(weight.size()).clone()
            m[weight.lt(-1.0)] = 0
            m[weight.gt(1.0)] = 0
            m = m.mul(self.target_modules[index].grad.data)
            m_add = weight.sign().mul(self.target_modules[index].grad.data)
            m_add = m_add.sum(1, keepdim=True).expand(weight.size()).div(n).mul(weight.sign())
            self.target_modules[index].grad.data = m.add(m_add).mul(1.0 - 1.0 / weight.size(1)).mul(n)


best_acc = 0
accs = []


def train(step, data, target):
    global best_acc
    bin_op.binarization()
    optimizer.zero_grad()
    output = model(data)
    loss = criterion(output, target)
    loss.backward()
    bin_op.restore()
    bin_op.updateBinaryGradWeight()
    optimizer.step()
    if step.number % 4 == 3:
        acc = test()
        accs.append(acc)
        if acc > best_acc:
            best_acc = acc
    return loss


def test():
    model.eval()
    bin_op.binarization()
    with torch.no_grad():
        correct = (model.module(x_val).max(1)[1] == y_val).sum()
    bin_op.restore()
    model.train()
    return 100.0 * correct.item() / len(x_val)


def adjust_learning_rate(optimizer, epoch):
    if epoch in [3, 5]:
        for param_group in optimizer.param_groups:
            param_group["lr"] = param_group["lr"] * (0.1 if best_acc > 40 else 0.5)


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(1)
    x_val, y_val = torch.randn(24, 8), torch.randint(0, 4, (24,))
    model = DDP(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    )
    optimizer = optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-5)
    criterion = nn.CrossEntropyLoss()
    bin_op = BinOp(model)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(8, 8), torch.randint(0, 4, (8,)))
    )
    for step in training.steps(until=18):
        adjust_learning_rate(optimizer, step.number // 3) if step.number % 3 == 0 else None
        with step as (data, target):
            train(step, data, target)
    finish(job, model=model, opt=optimizer, best=best_acc, accs=accs, saved=bin_op.saved_params)
