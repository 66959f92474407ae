"""The EarlyStopping class of many notebooks: it saves checkpoint.pt when the validation is better, which is loaded at the
end; losses of an epoch in lists, an average of each epoch."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.sampler import SubsetRandomSampler

import relight
from tests.idioms.digest import finish


class EarlyStopping:
    def __init__(self, patience=7, verbose=False, delta=0, path="checkpoint.pt", trace_func=print):
        self.patience, self.verbose, self.delta, self.path, self.trace_func = patience, verbose, delta, path, trace_func
        self.counter = 0
        self.best_val_loss = None
        self.early_stop = False
        self.val_loss_min = np.inf

    def __call__(self, val_loss, model):
        if np.isnan(val_loss):
            self.trace_func("Validation loss is NaN. Ignoring this epoch.")
            return
        if self.best_val_loss is None or val_loss < self.best_val_loss - self.delta:
            self.best_val_loss = val_loss
            self.save_checkpoint(val_loss, model)
            self.counter = 0
        else:
            self.counter += 1
            self.trace_func(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            if self.counter >= self.patience:
                self.early_stop = True

    def save_checkpoint(self, val_loss, model):
        if self.verbose:
            self.trace_func(f"Validation loss decreased ({self.val_loss_min:.6f} --> {val_loss:.6f}). Saving model ...")
        torch.save(model.state_dict(), self.path)
        self.val_loss_min = val_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.dropout = nn.Linear(16, 48), nn.Linear(48, 5), nn.Dropout(0.5)

    def forward(self, x):
        return self.fc2(self.dropout(torch.relu(self.fc1(x))))


def create_datasets(batch_size, valid_size=0.25):
    data = TensorDataset(torch.randn(64, 16), torch.randint(5, (64,)))
    indices = list(range(len(data)))
    np.random.shuffle(indices)
    split = int(np.floor(valid_size * len(data)))
    train_sampler, valid_sampler = SubsetRandomSampler(indices[split:]), SubsetRandomSampler(indices[:split])
    return DataLoader(data, batch_size, sampler=train_sampler), DataLoader(data, batch_size, sampler=valid_sampler)


def validate(model, valid_loader, criterion):
    model.eval()
    valid_losses = []
    with torch.no_grad():
        for data, target in valid_loader:
            valid_losses.append(criterion(model(data), target).item())
    model.train()
    mean = torch.tensor(np.average(valid_losses))
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def train_model(model, train_loader, valid_loader, patience, n_epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    criterion = nn.CrossEntropyLoss()
    train_losses, avg_train_losses, avg_valid_losses = [], [], []
    early_stopping = EarlyStopping(patience=patience, verbose=True, path=f"checkpoint{dist.get_rank()}.pt")
    training = relight.Training(model=model, optimizer=optimizer, data=train_loader)
    for step in training.steps(until=n_epochs * len(train_loader)):
        with step as (data, target):
            if step.number and step.number % len(train_loader) == 0:
                valid_loss = validate(model.module, valid_loader, criterion)
                avg_train_losses.append(np.average(train_losses))
                avg_valid_losses.append(valid_loss)
                train_losses = []
                early_stopping(valid_loss, model.module)
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            train_losses.append(loss.item())
        if early_stopping.early_stop:
            print("Early stopping")
            break
    model.module.load_state_dict(torch.load(f"checkpoint{dist.get_rank()}.pt", weights_only=True))
    return model, avg_train_losses, avg_valid_losses


job = relight.init()
torch.manual_seed(5)
np.random.seed(5)
train_loader, valid_loader = create_datasets(6)
model, train_loss, valid_loss = train_model(DDP(Net()), train_loader, valid_loader, 3, 12)
finish(job, model=model, train_loss=train_loss, valid_loss=valid_loss)
