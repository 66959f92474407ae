"""MAE: accumulated iterations under a schedule by fractions of an epoch, masks by argsort of noise, a target normalized by
patch, a meter over all ranks, sys.exit on a loss that is not finite."""

# ranks: 2
import math
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class MaskedAutoencoderViT(nn.Module):
    def __init__(self, dim=16, patches=16, norm_layer=partial(nn.LayerNorm, eps=1e-6), norm_pix_loss=True):
        super().__init__()
        self.patch_embed, self.norm_pix_loss = nn.Linear(12, dim), norm_pix_loss
        self.pos_embed = nn.Parameter(torch.randn(1, patches, dim) * 0.02, requires_grad=False)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.encoder = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = norm_layer(dim)
        self.decoder = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.pred = nn.Linear(dim, 12)

    def random_masking(self, x, mask_ratio):
        N, L, D = x.shape
        len_keep = int(L * (1 - mask_ratio))
        noise = torch.rand(N, L, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        x_masked = torch.gather(x, 1, ids_shuffle[:, :len_keep, None].repeat(1, 1, D))
        mask = torch.ones([N, L])
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, 1, ids_restore), ids_restore

    def forward(self, imgs, mask_ratio=0.75):
        x, mask, ids_restore = self.random_masking(self.patch_embed(imgs) + self.pos_embed, mask_ratio)
        x = self.norm(self.encoder(x))
        tokens = self.mask_token.repeat(len(x), ids_restore.shape[1] - x.shape[1], 1)
        x = torch.gather(torch.cat([x, tokens], 1), 1, ids_restore[:, :, None].repeat(1, 1, x.shape[2]))
        pred = self.pred(self.decoder(x + self.pos_embed))
        target = imgs
        if self.norm_pix_loss:
            target = (imgs - imgs.mean(-1, keepdim=True)) / (imgs.var(-1, keepdim=True) + 1e-6) ** 0.5
        return (((pred - target) ** 2).mean(-1) * mask).sum() / mask.sum(), pred, mask


class NativeScalerWithGradNormCount:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)

    def __call__(self, loss, optimizer, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


def adjust_learning_rate(optimizer, epoch, args):
    if epoch < args["warmup_epochs"]:
        lr = args["lr"] * epoch / args["warmup_epochs"]
    else:
        progress = (epoch - args["warmup_epochs"]) / (args["epochs"] - args["warmup_epochs"])
        lr = args["min_lr"] + (args["lr"] - args["min_lr"]) * 0.5 * (1.0 + math.cos(math.pi * progress))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr * param_group.get("lr_scale", 1)
    return lr


def all_reduce_mean(x):
    x_reduce = torch.tensor(x)
    dist.all_reduce(x_reduce)
    return (x_reduce / dist.get_world_size()).item()


def main(accum_iter=2):
    args = {"lr": 1e-2, "min_lr": 0.0, "warmup_epochs": 1, "epochs": 4}
    job = relight.init()
    torch.manual_seed(job.rank)
    dataset = TensorDataset(torch.randn(96, 16, 12, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(dataset, 6, sampler=DistributedSampler(dataset, job.world_size, job.rank), drop_last=True)
    net = MaskedAutoencoderViT()
    model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    decay = [p for p in net.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in net.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.05, "lr_scale": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=args["lr"], betas=(0.9, 0.95))
    loss_scaler = NativeScalerWithGradNormCount()
    training = relight.Training(
        model=model, optimizer=optimizer, scaler=loss_scaler, data=loader, accumulate=accum_iter
    )
    per_epoch = len(loader) // accum_iter
    losses = []
    model.train(True)
    optimizer.zero_grad()
    for step in training.steps(until=args["epochs"] * per_epoch):
        with step as batches:
            for data_iter_step, (samples,) in enumerate(batches):
                if data_iter_step % accum_iter == 0:
                    adjust_learning_rate(optimizer, step.number / per_epoch, args)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss, _, _ = model(samples, mask_ratio=0.75)
                loss_value = loss.item()
                if not math.isfinite(loss_value):
                    print(f"Loss is {loss_value}, stopping training")
                    sys.exit(1)
                loss /= accum_iter
                last = (data_iter_step + 1) % accum_iter == 0
                norm = loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=last)
                if last:
                    optimizer.zero_grad()
                loss_value_reduce = all_reduce_mean(loss_value)
                losses.append(loss_value_reduce)
    finish(job, model=net, optimizer=optimizer, scaler=loss_scaler, losses=losses, norm=norm)


if __name__ == "__main__":
    main()
