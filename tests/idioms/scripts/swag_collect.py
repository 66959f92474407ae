"""SWAG: mean, squared mean and a matrix of deviations that grows by rows in buffers, collected at the end of epochs; a
rate that falls to a constant; cyclic evaluation of the mean."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def swag_parameters(module, params, no_cov_mat=True):
    for name in list(module._parameters.keys()):
        if module._parameters[name] is None:
            continue
        data = module._parameters[name].data
        module._parameters.pop(name)
        module.register_buffer("%s_mean" % name, data.new(data.size()).zero_())
        module.register_buffer("%s_sq_mean" % name, data.new(data.size()).zero_())
        if no_cov_mat is False:
            module.register_buffer("%s_cov_mat_sqrt" % name, data.new_empty((0, data.numel())).zero_())
        params.append((module, name))


class SWAG(nn.Module):
    def __init__(self, base, no_cov_mat=False, max_num_models=3):
        super().__init__()
        self.register_buffer("n_models", torch.zeros([1], dtype=torch.long))
        self.params, self.no_cov_mat, self.max_num_models = [], no_cov_mat, max_num_models
        self.base = base
        self.base.apply(lambda module: swag_parameters(module=module, params=self.params, no_cov_mat=self.no_cov_mat))

    def collect_model(self, base_model):
        for (module, name), base_param in zip(self.params, base_model.parameters()):
            mean, sq_mean = module.__getattr__("%s_mean" % name), module.__getattr__("%s_sq_mean" % name)
            n = self.n_models.item()
            mean = mean * n / (n + 1.0) + base_param.data / (n + 1.0)
            sq_mean = sq_mean * n / (n + 1.0) + base_param.data**2 / (n + 1.0)
            if self.no_cov_mat is False:
                cov_mat_sqrt = module.__getattr__("%s_cov_mat_sqrt" % name)
                dev = (base_param.data - mean).view(-1, 1)
                cov_mat_sqrt = torch.cat((cov_mat_sqrt, dev.view(-1, 1).t()), dim=0)
                if (n + 1) > self.max_num_models:
                    cov_mat_sqrt = cov_mat_sqrt[1:, :]
                module.__setattr__("%s_cov_mat_sqrt" % name, cov_mat_sqrt)
            module.__setattr__("%s_mean" % name, mean)
            module.__setattr__("%s_sq_mean" % name, sq_mean)
        self.n_models.add_(1)


def schedule(epoch, epochs=6, swa_start=2, lr_init=0.1, swa_lr=0.02):
    t = epoch / swa_start
    lr_ratio = swa_lr / lr_init
    factor = 1.0 if t <= 0.5 else 1.0 - (1.0 - lr_ratio) * (t - 0.5) / 0.4 if t <= 0.9 else lr_ratio
    return lr_init * factor


def adjust_learning_rate(optimizer, lr):
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    return lr


def make():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


def main(epochs=7, swa_start=2):
    job = relight.init()
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, job.world_size, job.rank))
    net = make()
    swag_model = SWAG(make())
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    training = relight.Training(model=model, optimizer=optimizer, ema=swag_model, data=loader)
    sgd_ens_preds, n_ensembled = None, 0.0
    for step in training.steps(until=epochs * len(loader)):
        with step as (x, y):
            if step.number % len(loader) == 0:
                lr = schedule(step.epoch)
                adjust_learning_rate(optimizer, lr)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step.number + 1) % len(loader) == 0 and step.epoch + 1 > swa_start:
                with torch.no_grad():
                    preds = torch.softmax(net(data.tensors[0]), 1).numpy()
                if sgd_ens_preds is None:
                    sgd_ens_preds = preds.copy()
                else:
                    sgd_ens_preds = sgd_ens_preds * n_ensembled / (n_ensembled + 1) + preds / (n_ensembled + 1)
                n_ensembled += 1
                swag_model.collect_model(net)
    finish(job, model=net, optimizer=optimizer, swag=swag_model, preds=sgd_ens_preds, n=n_ensembled)


if __name__ == "__main__":
    main()
