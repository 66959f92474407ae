"""A textbook's trainer: hyperparameters saved from the frame, methods added by a decorator, an accumulator, an animator."""

# ranks: 2
import collections
import inspect

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def add_to_class(Class):
    def wrapper(obj):
        setattr(Class, obj.__name__, obj)

    return wrapper


class HyperParameters:
    def save_hyperparameters(self, ignore=[]):
        frame = inspect.currentframe().f_back
        _, _, _, local_vars = inspect.getargvalues(frame)
        self.hparams = {
            k: v for k, v in local_vars.items() if k not in set(ignore + ["self"]) and not k.startswith("_")
        }
        for k, v in self.hparams.items():
            setattr(self, k, v)


class Accumulator:
    def __init__(self, n):
        self.data = [0.0] * n

    def add(self, *args):
        self.data = [a + float(b) for a, b in zip(self.data, args)]

    def reset(self):
        self.data = [0.0] * len(self.data)

    def __getitem__(self, idx):
        return self.data[idx]


class ProgressBoard(HyperParameters):
    def __init__(self, xlabel=None, ls=["-", "--"], every=2):
        self.save_hyperparameters()

    def draw(self, x, y, label, every_n=1):
        Point = collections.namedtuple("Point", ["x", "y"])
        if not hasattr(self, "raw_points"):
            self.raw_points, self.data = collections.OrderedDict(), collections.OrderedDict()
        if label not in self.raw_points:
            self.raw_points[label], self.data[label] = [], []
        points, line = self.raw_points[label], self.data[label]
        points.append((x, y))
        if len(points) != every_n:
            return
        mean = lambda values: sum(values) / len(values)
        line.append((mean([p[0] for p in points]), mean([p[1] for p in points])))
        points.clear()


class Module(nn.Module, HyperParameters):
    def __init__(self, plot_train_per_epoch=2):
        super().__init__()
        self.save_hyperparameters()
        self.board = ProgressBoard()

    def forward(self, X):
        return self.net(X)

    def training_step(self, batch):
        l = self.loss(self.wrapped(batch[0]), batch[1])
        self.plot("loss", l)
        return l

    def plot(self, key, value):
        self.board.draw(
            self.trainer.train_batch_idx / 4, float(value.detach()), "train_" + key, self.plot_train_per_epoch
        )


class LinearRegression(Module):
    def __init__(self, lr, num_in):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(num_in, 1)
        self.net.weight.data.normal_(0, 0.1)


@add_to_class(LinearRegression)
def loss(self, y_hat, y):
    return nn.functional.huber_loss(y_hat, y)


class SGD(HyperParameters):
    def __init__(self, params, lr):
        self.save_hyperparameters()
        self.params = list(params)

    def step(self):
        for param in self.params:
            param.data -= self.lr * param.grad

    def zero_grad(self):
        for param in self.params:
            if param.grad is not None:
                param.grad.zero_()


@add_to_class(LinearRegression)
def configure_optimizers(self):
    return SGD(self.parameters(), self.lr)


class Trainer(HyperParameters):
    def __init__(self, max_steps, gradient_clip_val=0):
        self.save_hyperparameters()
        self.metric, self.train_batch_idx = Accumulator(3), 0

    def fit(self, model):
        model.trainer, self.model = self, model
        object.__setattr__(model, "wrapped", DDP(model))
        self.optim = model.configure_optimizers()
        training = relight.Training(
            model=model.wrapped, data=lambda n: (torch.randn(6, model.num_in), torch.randn(6, 1))
        )
        for step in training.steps(until=self.max_steps):
            with step as batch:
                self.fit_step(batch)


@add_to_class(Trainer)
def fit_step(self, batch):
    loss = self.model.training_step(batch)
    self.optim.zero_grad()
    loss.backward()
    if self.gradient_clip_val > 0:
        self.clip_gradients(self.gradient_clip_val, self.model)
    self.metric.add(loss.detach() * len(batch[0]), 1, len(batch[0]))
    if self.metric[1] >= 5:
        if self.metric[0] / self.metric[2] > 0.3:
            self.optim.lr *= 0.9
        self.metric.reset()
    self.train_batch_idx += 1
    self.optim.step()


@add_to_class(Trainer)
def clip_gradients(self, grad_clip_val, model):
    params = [p for p in model.parameters() if p.requires_grad]
    norm = torch.sqrt(sum(torch.sum(p.grad**2) for p in params))
    if norm > grad_clip_val:
        for param in params:
            param.grad[:] *= grad_clip_val / norm


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(1)
    model, trainer = LinearRegression(lr=0.1, num_in=3), Trainer(max_steps=17, gradient_clip_val=0.5)
    trainer.fit(model)
    finish(
        job,
        net=model.net,
        lr=trainer.optim.lr,
        metric=trainer.metric.data,
        board=list(model.board.data.values()),
        raw=list(model.board.raw_points.values()),
        idx=trainer.train_batch_idx,
    )
