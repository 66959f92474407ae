"""Mixed precision as apex did it: a model in bfloat16, and an optimizer over a float32 copy of its parameters."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def prep_param_lists(model):
    model_params = [param for param in model.parameters() if param.requires_grad]
    master_params = [param.clone().float().detach() for param in model_params]
    return model_params, nn.ParameterList(master_params)


def model_grads_to_master_grads(model_params, master_params):
    for model, master in zip(model_params, master_params):
        if model.grad is not None:
            if master.grad is None:
                master.grad = torch.empty_like(master)
            master.grad.data.copy_(model.grad.data)
        else:
            master.grad = None


def master_params_to_model_params(model_params, master_params):
    for model, master in zip(model_params, master_params):
        model.data.copy_(master.data)


job = relight.init()
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 3)).to(torch.bfloat16)
model = DDP(net)
model_params, master_params = prep_param_lists(model)
optimizer = torch.optim.AdamW(master_params, 0.02)
loss_scale, good = 128.0, 0
training = relight.Training(
    model={"half": model, "master": master_params}, optimizer=optimizer, data=lambda n: torch.randn(8, 6)
)
for step in training.steps(until=18):
    with step as x:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(torch.bfloat16)).float(), x[:, :3].argmax(1))
        (loss * loss_scale).backward()
        model_grads_to_master_grads(model_params, master_params)
        for param in master_params:
            param.grad.data.div_(loss_scale)
        good += 1
        if good == 7:
            loss_scale, good = loss_scale * 2, 0
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
finish(job, model=model, optimizer=optimizer, master=list(master_params), loss_scale=loss_scale)
