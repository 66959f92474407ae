"""GRPO on the CPU: ranks that train, and processes that generate, with weights that relight sends them.

    python examples/grpo.py runs/grpo --serve a & python examples/grpo.py runs/grpo --serve b &
    relight run --nproc-per-node 2 --standby 1 --run-dir runs/grpo examples/grpo.py runs/grpo

Every step is on-policy: its completions are of the weights that it updates. Completions are a function of the version
of the weights, of the prompts and of a seed, so that a step which is computed again gets the same ones, from whichever
engine. Ranks and engines may be killed at any time: rewards and weights are those of a run without failures. The policy
is a small Llama with random weights, and learns to repeat the number that the prompt begins with.
"""

import argparse
import functools
import json
import threading
import urllib.request
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import relight
from relight.errors import TransferError

WORDS, PROMPT, LENGTH, GROUP = 12, 2, 6, 8  # vocabulary; tokens of a prompt and a completion; completions of a prompt
BATCH = 4  # prompts of a rank in a step
ANSWER_SECONDS = 10.0  # for one request; while it lasts a rank is not free to recover
ENGINE_SECONDS = 5.0  # after which an engine that does not take new weights is left out

Tokens = list[list[int]]


def make_policy() -> Any:
    """Make the model, with the same random weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@torch.no_grad()
def complete(policy: Any, prompts: torch.Tensor, seed: int) -> torch.Tensor:
    """Sample GROUP completions of each prompt. Returns prompts and completions, int64 [prompts * GROUP, tokens]."""
    torch.manual_seed(seed)
    prompts = prompts.repeat_interleave(GROUP, 0)
    written: torch.Tensor = policy.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=LENGTH, min_new_tokens=LENGTH
    )
    return written


# --- engines ------------------------------------------------------------------------------------------------------
def serve(place: Path, name: str) -> None:
    """Answer requests for completions of exactly the version that they name."""
    policy = make_policy()
    receiver = relight.Receiver(place, model=policy, name=name)
    one_at_a_time = threading.Lock()  # `generate` draws from the one random stream of the process

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with receiver.serving() as version, one_at_a_time:
                is_there = version == ask["version"]
                written = complete(policy, torch.tensor(ask["prompts"]), ask["seed"]).tolist() if is_there else None
            if is_there:
                print(f"version {version}", flush=True)
            body = json.dumps(written).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        address = place / "engines" / name
        address.parent.mkdir(exist_ok=True)
        new = address.with_name(f".{name}")
        new.write_text(f"http://127.0.0.1:{http.server_address[1]}")
        new.rename(address)
        http.serve_forever()


def ask_engines(place: Path, rank: int, ask: dict[str, Any]) -> Tokens | None:
    """Ask one engine after the other, each rank another one first. None: no engine has the version now."""
    engines = sorted(path for path in (place / "engines").glob("[!.]*"))
    for number in range(len(engines)):
        url = engines[(rank + number) % len(engines)].read_text()
        try:
            with urllib.request.urlopen(url, json.dumps(ask).encode(), timeout=ANSWER_SECONDS) as answer:
                written: Tokens | None = json.load(answer)
        except (OSError, ValueError, HTTPException):  # it has died, or dies meanwhile
            continue
        if written is not None:
            return written
    return None


# --- ranks --------------------------------------------------------------------------------------------------------
@functools.cache
def publisher(place: Path) -> relight.Publisher:
    """Return what sends weights, in the process that is rank 0."""
    return relight.Publisher(place, stall_timeout_seconds=ENGINE_SECONDS, commit_timeout_seconds=ENGINE_SECONDS)


def send_weights(place: Path, policy: nn.Module, version: int, generation: int) -> None:
    """Bring every engine that can be reached to `version`. Returns when the weights are not read any more."""
    try:
        sender = publisher(place)
        engines = sender.engines()
        if newer := [engine.name for engine in engines if engine.version > version]:
            raise RuntimeError(f"engines {', '.join(newer)} have later weights, of an earlier run: start them again")
        if any(engine.version != version for engine in engines):
            weights = relight.TensorSource(relight.weights_of(policy))
            sender.publish(weights, version=version, generation=generation)
    except TransferError:
        pass  # no engine is there, or the rank 0 before is still ending: asked again a moment later


def roll_out(job: relight.Job, place: Path, policy: nn.Module, prompts: torch.Tensor, step: int) -> torch.Tensor:
    """Return completions of this step's weights, from engines.

    All ranks look for as long as one of them has none: a failure of a rank ends the wait, since a collective fails, and
    no rank seems to hang because its engine is away.
    """
    ask = {"version": step, "prompts": prompts.tolist(), "seed": step * job.world_size + job.rank}
    written: Tokens | None = None
    while True:
        if job.rank == 0:
            send_weights(place, policy, step, job.generation)
        dist.barrier()
        written = written or ask_engines(place, job.rank, ask)
        have_it = torch.tensor(float(written is not None))
        dist.all_reduce(have_it, dist.ReduceOp.MIN)
        if written is not None and have_it.item():
            return torch.tensor(written)


def loss_of(policy: nn.Module, written: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return GRPO's loss of one on-policy update: each completion is as good as it is better than its group."""
    groups = rewards.view(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    logits = policy(written).logits[:, PROMPT - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, written[:, PROMPT:, None]).squeeze(-1)
    ratio = torch.exp(chosen - chosen.detach())  # of new to old policy: 1, but its gradient counts
    return -(ratio * advantages.view(-1, 1)).mean()


def train(options: argparse.Namespace) -> None:
    """Take the steps, as a rank."""
    job = relight.init()
    policy = make_policy()
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    prompts = torch.randint(1, WORDS, (64, PROMPT), generator=torch.Generator().manual_seed(0))
    sampler: DistributedSampler[Any] = DistributedSampler(prompts, job.world_size, job.rank)  # type: ignore[arg-type]
    data: DataLoader[Any] = DataLoader(prompts, BATCH, sampler=sampler)  # type: ignore[arg-type]
    training = relight.Training(model=model, optimizer=optimizer, data=data)
    training.log_to(Curve())
    for step in training.steps(until=options.steps):
        with step as batch:
            if step.warmup:  # a standby rehearses alone
                written = complete(policy, batch, seed=0)
            else:
                written = roll_out(job, options.place, policy, batch, step.number)
            rewards = (written[:, PROMPT:] == written[:, :1]).float().mean(1)
            loss = loss_of(model, written, rewards)
            loss.backward()
            reward = rewards.mean()
            dist.all_reduce(reward)
            step.report(loss, reward=reward / job.world_size)
            optimizer.step()
            optimizer.zero_grad()
    if job.rank == 0:
        send_weights(options.place, policy, options.steps, job.generation)
    digest = relight.digest_weights(relight.weights_of(policy))
    print(f"rank {job.rank}: {options.steps} steps, digest {digest}", flush=True)


class Curve:
    """Prints the rewards."""

    def log(self, values: dict[str, float], *, step: int) -> None:
        """Print those of one step."""
        print(f"step {step}: reward {values['reward']:.3f}", flush=True)


def main() -> None:
    """Serve or train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, help="directory in which ranks and engines find each other")
    parser.add_argument("--serve", metavar="NAME", help="be an engine of this name")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args()
    options.place.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if options.serve:
        serve(options.place, options.serve)
    else:
        train(options)


if __name__ == "__main__":
    main()
