"""SCAFFOLD in one process group: clients are objects with control variates by name, sampled by np.random.choice, local models
loaded from the server's state_dict, deltas averaged over ranks, a server that keeps a history of participants."""

# ranks: 2
import copy
from collections import OrderedDict, defaultdict

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Client:
    def __init__(self, cid, model):
        self.cid, self.rounds, self.lr = cid, 0, 0.05
        self.control = OrderedDict((k, torch.zeros_like(v)) for k, v in model.named_parameters())
        self.delta_y, self.delta_c = None, None
        self.center = torch.randn(5)

    def train(self, server_state, server_control, local):
        local.load_state_dict(server_state)
        x = {k: v.clone() for k, v in server_state.items()}
        steps = 2 + self.cid % 2
        for _ in range(steps):
            data = torch.randn(8, 5) + self.center
            loss = F.mse_loss(local(data), data.sum(1, keepdim=True).sin())
            grads = torch.autograd.grad(loss, list(local.parameters()))
            with torch.no_grad():
                for (k, p), g in zip(local.named_parameters(), grads):
                    p -= self.lr * (g - self.control[k] + server_control[k])
        self.delta_y, self.delta_c = {}, {}
        for k, p in local.named_parameters():
            self.delta_y[k] = p.data - x[k]
            c_plus = self.control[k] - server_control[k] + (x[k] - p.data) / (steps * self.lr)
            self.delta_c[k] = c_plus - self.control[k]
            self.control[k] = c_plus
        self.rounds += 1
        return loss.item()


def main():
    job = relight.init()
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    local = copy.deepcopy(server)
    clients = [Client(i, server) for i in range(6)]
    control = {k: torch.zeros_like(v) for k, v in server.named_parameters()}
    training = relight.Training(model=server, per_rank={"local": local})
    participation, train_loss = defaultdict(int), []
    for comm_round in training.steps(until=16):
        with comm_round:
            rng = np.random.RandomState(comm_round.number)
            selected = rng.choice(6, 4, replace=False)[job.rank :: job.world_size]
            losses = []
            for cid in selected:
                participation[int(cid)] += 1
                losses.append(clients[cid].train(server.state_dict(), control, local))
            for name, p in server.named_parameters():
                dy = sum(clients[c].delta_y[name] for c in selected)
                dc = sum(clients[c].delta_c[name] for c in selected)
                dist.all_reduce(dy)
                dist.all_reduce(dc)
                with torch.no_grad():
                    p.add_(dy / 4)
                control[name] = control[name] + dc / 6
            avg = torch.tensor(losses).mean()
            dist.all_reduce(avg)
        train_loss.append(avg.item())
        print(f"Round {comm_round.number:3d}, Average loss {avg:.3f}")
    finish(
        job, server=server, control=control, clients=[c.control for c in clients], rounds=[c.rounds for c in clients],
        part=dict(participation), n=len(train_loss),
    )  # fmt: skip


if __name__ == "__main__":
    main()
