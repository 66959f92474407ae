"""A rollout worker of verl with relight's checkpoint engine, told what to do by lines on its standard input.

prepare                     prints the metadata
init {...}                  takes up its role
receive STEP                prints the digest of what it got, or the error
hold STEP                   takes the first tensor, says so, and takes no more
drop STEP                   takes the first tensor, and leaves the update
"""

import asyncio
import json
import sys
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

import relight
import relight.integrations.verl
from relight.errors import TransferError

SECONDS = 60.0


async def receive(engine: Any, step: int) -> str:
    weights: dict[str, torch.Tensor] = {}
    try:
        async for name, tensor in engine.receive_weights(global_steps=step):
            weights[name] = tensor
    except TransferError as error:
        return f"error: {error}"
    return relight.digest_weights(weights)


async def hold(engine: Any, step: int) -> None:
    async for _ in engine.receive_weights(global_steps=step):
        print("held", flush=True)
        sys.stdin.readline()  # until this process is killed


async def drop(engine: Any, step: int) -> str:
    weights = engine.receive_weights(global_steps=step)
    name, _ = await anext(weights)
    await weights.aclose()
    return f"dropped after {name}"


def main() -> None:
    engine = CheckpointEngineRegistry.new("relight", bucket_size=int(sys.argv[1]), timeout_seconds=SECONDS)
    for line in sys.stdin:
        order, _, rest = line.strip().partition(" ")
        if order == "prepare":
            print(json.dumps(engine.prepare()), flush=True)
        elif order == "init":
            print(engine.init_process_group(**json.loads(rest)), flush=True)
        elif order == "receive":
            print(asyncio.run(receive(engine, int(rest))), flush=True)
        elif order == "drop":
            print(asyncio.run(drop(engine, int(rest))), flush=True)
        elif order == "hold":
            asyncio.run(hold(engine, int(rest)))


if __name__ == "__main__":
    main()
