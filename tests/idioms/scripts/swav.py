"""SwAV: prototypes normalized in place before forward, a queue that starts late, gradients dropped at first."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


@torch.no_grad()
def distributed_sinkhorn(out, world_size, epsilon=0.05, iterations=3):
    Q = torch.exp(out / epsilon).t()
    B, K = Q.shape[1] * world_size, Q.shape[0]
    sum_Q = torch.sum(Q)
    dist.all_reduce(sum_Q)
    Q /= sum_Q
    for _ in range(iterations):
        sum_of_rows = torch.sum(Q, dim=1, keepdim=True)
        dist.all_reduce(sum_of_rows)
        Q /= sum_of_rows
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    Q *= B
    return Q.t()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        self.prototypes = nn.Linear(6, 5, bias=False)

    def forward(self, x):
        x = F.normalize(self.backbone(x), dim=1, p=2)
        return x, self.prototypes(x)


def main():
    job = relight.init()
    torch.manual_seed(31)
    world = dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = [0.1 * (1 + i) / 5 for i in range(5)] + [0.1] * 20
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(2, 6, 8))
    queue, use_the_queue = None, False
    for step in training.steps(until=18):
        if step.number >= 6 and queue is None:
            queue = torch.zeros(2, 12, 6)
        with step as views:
            for param_group in optimizer.param_groups:
                param_group["lr"] = schedule[step.number]
            with torch.no_grad():
                w = model.module.prototypes.weight.data.clone()
                w = nn.functional.normalize(w, dim=1, p=2)
                model.module.prototypes.weight.copy_(w)
            embedding, output = model(torch.cat(list(views)))
            embedding = embedding.detach()
            bs, loss = 6, 0
            for crop_id in range(2):
                with torch.no_grad():
                    out = output[bs * crop_id : bs * (crop_id + 1)].detach()
                    if queue is not None:
                        if use_the_queue or not torch.all(queue[crop_id, -1, :] == 0):
                            use_the_queue = True
                            out = torch.cat((torch.mm(queue[crop_id], model.module.prototypes.weight.t()), out))
                        queue[crop_id, bs:] = queue[crop_id, :-bs].clone()
                        queue[crop_id, :bs] = embedding[crop_id * bs : (crop_id + 1) * bs]
                    q = distributed_sinkhorn(out, world)[-bs:]
                x = output[bs * (1 - crop_id) : bs * (2 - crop_id)] / 0.1
                loss = loss - torch.mean(torch.sum(q * F.log_softmax(x, dim=1), dim=1))
            optimizer.zero_grad()
            loss.backward()
            if step.number < 3:
                for name, p in model.named_parameters():
                    if "prototypes" in name:
                        p.grad = None
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, queue=queue)


if __name__ == "__main__":
    main()
