"""The networks of composed scripts: each takes 12 numbers for each example and gives 4."""

BATCHNORM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))
"""

NETS = {
    "mlp": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))
""",
    "batchnorm": BATCHNORM,
    "conv": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x.unsqueeze(1))))
        return self.last(x.mean(2))
""",
    "transformer": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.places = nn.Parameter(torch.zeros(4, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x.view(len(x), 4, 3)) + self.places
        return self.last(self.block(x).mean(1))
""",
    "rnn": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.GRU(3, 8, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        states, _ = self.first(x.view(len(x), 4, 3))
        return self.last(states[:, -1])
""",
    "rnn-carried": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.GRU(3, 8, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x, hidden):
        states, hidden = self.first(x.view(len(x), 4, 3), hidden)
        return self.last(states[:, -1]), hidden
""",
    "counter": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        warm = min(1.0, self.calls / 20)
        return self.last(torch.relu(self.first(x)) * warm)
""",
    "assigned-buffer": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        x = torch.relu(self.first(x))
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
        return self.last(x / (1 + self.scale))
""",
    "data-write": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 4)
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, x):
        x = torch.relu(self.first(x))
        if self.training:
            self.centre.data = self.centre.data * 0.9 + x.detach().mean(0) * 0.1
        return self.last(x - self.centre)
""",
    "spectral": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(12, 16))
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))
""",
    "weight-norm": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(12, 16))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))
""",
    "history": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 4)
        self.recent = collections.deque(maxlen=3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        if self.training:
            self.recent.append(x.detach().mean(0))
        return self.last(x - torch.stack(list(self.recent)).mean(0)) if self.recent else self.last(x)
""",
    "tied": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 4)
        self.last = nn.Linear(12, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) @ self.first.weight)
""",
    "dropout": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.first(x))))
""",
    "checkpointed": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.utils.checkpoint.checkpoint(self.middle, x, use_reentrant=False)
        return self.last(x)
""",
    "custom-function": """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(Sign.apply(self.first(x)))
""",
}

IMPORTS = {"history": ("import collections",), "checkpointed": ("import torch.utils.checkpoint",)}

# Values that a net keeps outside of parameters and buffers, as expressions of the unwrapped `net`.
KEPT = {"counter": ("net.calls",), "history": ("list(net.recent)",)}

GENERATOR = """
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 12)

    def forward(self, z):
        return self.last(torch.relu(self.norm(self.first(z))))
"""

VALUE = """
class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).squeeze(1)
"""
