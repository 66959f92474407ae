"""A spiking network: neurons keep their membrane in an attribute that is a float until the first input, reset after each
step by a function over modules; surrogate gradients, a monitor by hooks, a threshold that adapts."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ATan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return ctx.alpha / 2 / (1 + (torch.pi / 2 * ctx.alpha * x).pow_(2)) * grad_output, None


class MemoryModule(nn.Module):
    def __init__(self):
        super().__init__()
        self._memories, self._memories_rv = {}, {}

    def register_memory(self, name, value):
        self._memories[name], self._memories_rv[name] = value, value

    def reset(self):
        for key in self._memories.keys():
            self._memories[key] = self._memories_rv[key]

    def detach(self):
        for key, value in self._memories.items():
            if isinstance(value, torch.Tensor):
                self._memories[key] = value.detach()

    def __getattr__(self, name):
        if "_memories" in self.__dict__ and name in self.__dict__["_memories"]:
            return self.__dict__["_memories"][name]
        return super().__getattr__(name)

    def __setattr__(self, name, value):
        memories = self.__dict__.get("_memories")
        if memories is not None and name in memories:
            memories[name] = value
        else:
            super().__setattr__(name, value)


class LIFNode(MemoryModule):
    def __init__(self, tau=2.0, v_threshold=1.0):
        super().__init__()
        self.register_memory("v", 0.0)
        self.tau, self.v_threshold, self.rate = tau, v_threshold, 0.0

    def forward(self, x):
        if isinstance(self.v, float):
            self.v = torch.full_like(x, self.v)
        self.v = self.v + (x - self.v) / self.tau
        spike = ATan.apply(self.v - self.v_threshold, 2.0)
        self.v = (1.0 - spike) * self.v
        return spike


def reset_net(net):
    for m in net.modules():
        if hasattr(m, "reset"):
            m.reset()


def detach_net(net):
    for m in net.modules():
        if hasattr(m, "detach"):
            m.detach()


class OutputMonitor:
    def __init__(self, net, instance):
        self.records, self.monitored_layers = [], []
        for name, module in net.named_modules():
            if isinstance(module, instance):
                self.monitored_layers.append(name)
                module.register_forward_hook(self.create_hook())

    def create_hook(self):
        def hook(m, x, y):
            self.records.append(y.detach().mean().item())
            m.rate = 0.95 * m.rate + 0.05 * self.records[-1]

        return hook

    def clear_recorded_data(self):
        self.records.clear()


job = relight.init()
torch.manual_seed(2020)
net = nn.Sequential(nn.Linear(10, 24), LIFNode(), nn.Linear(24, 4), LIFNode())
monitor = OutputMonitor(net, LIFNode)
model = DDP(net, static_graph=False)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
training = relight.Training(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    data=lambda n: (torch.rand(8, 10) * 3, torch.randint(4, (8,))),
)
train_acc, train_samples, T = 0, 0, 4
for step in training.steps(until=20):
    with step as (img, label):
        optimizer.zero_grad()
        label_onehot = nn.functional.one_hot(label, 4).float()
        out_fr = 0.0
        for t in range(T - 1):
            with torch.no_grad():  # the first steps warm the membranes up
                net(img * torch.rand_like(img))
        out_fr = model(img)
        loss = nn.functional.mse_loss(out_fr, label_onehot)
        loss.backward()
        optimizer.step()
        train_samples += label.numel()
        train_acc += (out_fr.argmax(1) == label).float().sum().item()
        if step.number % 3 == 2:
            reset_net(net)
            monitor.clear_recorded_data()
        else:
            detach_net(net)
        for m in net.modules():
            if isinstance(m, LIFNode):
                m.v_threshold = min(1.5, max(0.5, m.v_threshold + 0.1 * (m.rate - 0.2)))
        scheduler.step()
finish(
    job, model=net, optimizer=optimizer, v=[net[1].v, net[3].v], thresholds=[net[1].v_threshold, net[3].v_threshold],
    rates=[net[1].rate, net[3].rate], acc=train_acc, samples=train_samples, records=monitor.records,
)  # fmt: skip
