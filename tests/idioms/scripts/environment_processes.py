"""Environments in processes of their own, spoken to by pipes; a warm-up of the critic comes before the first step."""

# ranks: 2
import multiprocessing

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def serve(pipe, seed):
    rng = np.random.RandomState(seed)
    state = rng.randn(4).astype("float32")
    while True:
        action = pipe.recv()
        if action is None:
            return
        state = (0.9 * state + 0.1 * action + 0.1 * rng.randn(4)).astype("float32")
        pipe.send((state, -float(np.abs(state).sum())))


class VecEnv:
    def __init__(self, count, seed):
        context, self.pipes = multiprocessing.get_context("fork"), []
        for number in range(count):
            mine, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs, seed + number), daemon=True).start()
            self.pipes.append(mine)

    def step(self, actions):
        for pipe, action in zip(self.pipes, actions, strict=True):
            pipe.send(action)
        states, rewards = zip(*[pipe.recv() for pipe in self.pipes], strict=True)
        return torch.from_numpy(np.stack(states)), torch.tensor(rewards)


job = relight.init()
torch.manual_seed(2)
envs = VecEnv(2, 10 * job.rank)
net = DDP(nn.Linear(4, 3))
opt = torch.optim.Adam(net.parameters(), 0.01)
obs, rewards = torch.zeros(2, 4), torch.zeros(2)
training = relight.Training(model=net, optimizer=opt)
for step in training.steps(until=16):
    with step:
        if step.number >= 4:
            obs, rewards = envs.step(net.module(obs).argmax(1).tolist())
        loss = (net(obs).logsumexp(1) * rewards).mean() + net(torch.randn(2, 4)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
for pipe in envs.pipes:
    pipe.send(None)
finish(job, net=net, opt=opt, obs=obs)
