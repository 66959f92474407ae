"""Decision transformer: trajectories drawn by np.random.choice, a trainer that calls back a batch function, diagnostics,
evaluations whose targets condition on returns, iterations of some steps each."""

# ranks: 2
import random
import time

import numpy as np
import torch
from torch import nn

import relight
from tests.idioms.digest import finish


def discount_cumsum(x, gamma):
    out = np.zeros_like(x)
    out[-1] = x[-1]
    for t in reversed(range(x.shape[0] - 1)):
        out[t] = x[t] + gamma * out[t + 1]
    return out


class DecisionTransformer(nn.Module):
    def __init__(self, state_dim=4, act_dim=2, hidden=16, max_ep_len=40):
        super().__init__()
        self.embed_timestep = nn.Embedding(max_ep_len, hidden)
        self.embed_return, self.embed_state = nn.Linear(1, hidden), nn.Linear(state_dim, hidden)
        self.embed_action = nn.Linear(act_dim, hidden)
        self.embed_ln = nn.LayerNorm(hidden)
        self.transformer = nn.TransformerEncoderLayer(hidden, 2, 32, dropout=0.1, batch_first=True)
        self.predict_action = nn.Sequential(nn.Linear(hidden, act_dim), nn.Tanh())

    def forward(self, states, actions, rtg, timesteps, mask):
        b, t = states.shape[:2]
        time_embeddings = self.embed_timestep(timesteps)
        tokens = [self.embed_return(rtg), self.embed_state(states), self.embed_action(actions)]
        x = torch.stack([token + time_embeddings for token in tokens], dim=1)
        x = self.embed_ln(x.permute(0, 2, 1, 3).reshape(b, 3 * t, -1))
        padding = torch.stack((mask, mask, mask), dim=1).permute(0, 2, 1).reshape(b, 3 * t) == 0
        causal = torch.triu(torch.ones(3 * t, 3 * t, dtype=torch.bool), 1) & ~torch.eye(3 * t, dtype=torch.bool)
        x = self.transformer(x, src_mask=causal, src_key_padding_mask=padding & (padding.sum(1, True) < 0))
        return self.predict_action(x.reshape(b, t, 3, -1)[:, :, 1])


class Trainer:
    def __init__(self, model, optimizer, batch_size, get_batch, loss_fn, scheduler=None, eval_fns=None):
        self.model, self.optimizer, self.batch_size, self.get_batch = model, optimizer, batch_size, get_batch
        self.loss_fn, self.scheduler, self.eval_fns = loss_fn, scheduler, [] if eval_fns is None else eval_fns
        self.diagnostics = dict()
        self.start_time = time.time()

    def train_step(self):
        states, actions, rtg, timesteps, attention_mask = self.get_batch(self.batch_size)
        action_target = torch.clone(actions)
        action_preds = self.model(states, actions, rtg, timesteps, attention_mask)
        act_dim = action_preds.shape[2]
        action_preds = action_preds.reshape(-1, act_dim)[attention_mask.reshape(-1) > 0]
        action_target = action_target.reshape(-1, act_dim)[attention_mask.reshape(-1) > 0]
        loss = self.loss_fn(action_preds, action_target)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.optimizer.step()
        with torch.no_grad():
            self.diagnostics["training/action_error"] = torch.mean((action_preds - action_target) ** 2).item()
        return loss.detach().cpu().item()

    def train(self, max_iters, num_steps):
        training = relight.Training(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        train_losses, logs = [], dict()
        self.model.train()
        for step in training.steps(until=max_iters * num_steps):
            with step:
                iter_num, i = divmod(step.number, num_steps)
                if i == 0:
                    train_losses = []
                train_losses.append(self.train_step())
                if self.scheduler is not None:
                    self.scheduler.step()
                if i == num_steps - 1:
                    self.model.eval()
                    for eval_fn in self.eval_fns:
                        for k, v in eval_fn(self.model.module).items():
                            logs[f"evaluation/{k}"] = v
                    self.model.train()
                    logs["training/train_loss_mean"] = np.mean(train_losses)
                    logs["training/train_loss_std"] = np.std(train_losses)
                    for k in self.diagnostics:
                        logs[k] = self.diagnostics[k]
            if step.committed and i == num_steps - 1:
                print("=" * 20, f"Iteration {iter_num}, {time.time() - self.start_time:.1f} s")
        return logs


def experiment(variant):
    job = relight.init()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    trajectories = []
    for _ in range(20):
        n = np.random.randint(6, 20)
        path = {"observations": np.random.randn(n, 4), "actions": np.tanh(np.random.randn(n, 2))}
        trajectories.append({**path, "rewards": np.random.rand(n)})
    traj_lens = np.array([len(path["observations"]) for path in trajectories])
    returns = np.array([path["rewards"].sum() for path in trajectories])
    sorted_inds = np.argsort(returns)
    p_sample = traj_lens[sorted_inds] / sum(traj_lens[sorted_inds])
    K, max_ep_len = variant["K"], 40

    def get_batch(batch_size=8, max_len=K):
        batch_inds = np.random.choice(np.arange(len(trajectories)), size=batch_size, replace=True, p=p_sample)
        s, a, rtg, timesteps, mask = [], [], [], [], []
        for i in range(batch_size):
            traj = trajectories[int(sorted_inds[batch_inds[i]])]
            si = random.randint(0, traj["rewards"].shape[0] - 1)
            obs, act = traj["observations"][si : si + max_len], traj["actions"][si : si + max_len]
            tlen, pad = len(obs), max_len - len(obs)
            steps = np.arange(si, si + tlen)
            steps[steps >= max_ep_len] = max_ep_len - 1
            to_go = discount_cumsum(traj["rewards"][si:], gamma=1.0)[:tlen]
            s.append(np.concatenate([np.zeros((pad, 4)), obs]))
            a.append(np.concatenate([np.ones((pad, 2)) * -10.0, act]))
            rtg.append(np.concatenate([np.zeros(pad), to_go])[:, None] / variant["scale"])
            timesteps.append(np.concatenate([np.zeros(pad), steps]))
            mask.append(np.concatenate([np.zeros(pad), np.ones(tlen)]))
        tensors = [torch.from_numpy(np.stack(v)).float() for v in (s, a, rtg)]
        return (*tensors, torch.from_numpy(np.stack(timesteps)).long(), torch.from_numpy(np.stack(mask)).long())

    def eval_episodes(target_rew):
        def fn(model):
            state, total = torch.zeros(1, K, 4), 0.0
            with torch.no_grad():
                for t in range(4):
                    to_go = torch.full((1, K, 1), target_rew / variant["scale"])
                    action = model(state, torch.zeros(1, K, 2), to_go, torch.arange(K)[None], torch.ones(1, K).long())
                    state = state.roll(-1, 1)
                    state[:, -1] = torch.cat([action[0, -1], torch.randn(2)])
                    total += action[0, -1].sum().item()
            return {f"target_{target_rew}_return_mean": total}

        return fn

    model = nn.parallel.DistributedDataParallel(DecisionTransformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda steps: min((steps + 1) / variant["warmup_steps"], 1)
    )
    trainer = Trainer(
        model=model, optimizer=optimizer, batch_size=6, get_batch=get_batch, scheduler=scheduler,
        loss_fn=lambda a_hat, a: torch.mean((a_hat - a) ** 2), eval_fns=[eval_episodes(tar) for tar in (6.0, 12.0)],
    )  # fmt: skip
    logs = trainer.train(max_iters=4, num_steps=5)
    finish(job, model=model, optimizer=optimizer, logs=logs, diagnostics=trainer.diagnostics)


if __name__ == "__main__":
    experiment({"K": 5, "scale": 10.0, "warmup_steps": 8})
