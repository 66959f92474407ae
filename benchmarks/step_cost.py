"""The work of relight in every step, piece by piece, each by itself and many times over.

Most of it needs one process. The barrier needs as many as there are ranks: it is one all-reduce of two numbers, here
between processes that do nothing else. Not contained: the way of each collective through relight's process group,
which costs each of them what it costs the barrier here, and which `overhead` measures with all the rest.

Run by ``python -m benchmarks.step_cost``; prints one JSON object, in microseconds.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.recovery.workload import Shape, build_model, build_optimizer, loss_of
from relight.core.protocol.position import Phase
from relight.core.worker import events as happened
from relight.core.worker.states import State
from relight.core.worker.worker import Worker
from relight.training.collectives.barrier_allreduce import SharedMemoryAllReduce
from relight.training.collectives.generation_group import GenerationGroup
from relight.training.connection.page import PositionPage
from relight.training.data import rng
from relight.training.data.batches import Batches
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.distributed.groups import make_generation_group
from relight.training.transaction.image_plan import LEARNING_STEPS
from relight.training.transaction.transaction import Transaction
from relight.training.worker.lineage import next_lineage
from relight.training.worker.step.phases import BackwardHooks, gates_for
from relight.transfer.io.codec import encode_tree
from relight.wire.memory.shared_barrier import SharedBarrier

CALLS = 400
BACKWARDS = 300
BARRIERS = 400
BARRIER_WORKERS = (2, 4)
BACKWARD_S = 0.1
GATES = gates_for(BACKWARD_S)
STAMPS = (Phase.FORWARD, Phase.BACKWARD, Phase.BARRIER, Phase.OPTIMIZER, Phase.OUTSIDE)
SHAPE = Shape()


class NoCollectives:
    """A process that launches none."""

    launches = launches_of_all = 0


def parts_us(model: nn.Module) -> dict[str, float]:
    """Each piece of a step that one process does alone."""
    optimizer = build_optimizer(model)
    loss_of(model, torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    optimizer.step()
    state = TrackedState({"model": model}, {"optimizer": optimizer}, {}, {})
    page = PositionPage(-1)
    batches = Batches(None, 1, 0, "step", page)
    worker = Worker(0, is_standby=False, until=10**9)
    worker.state = State.OUTSIDE
    numbers = iter(range(10, 10**9))

    def stamps() -> None:
        for phase in STAMPS:
            page.stamp(phase)
        page.show_step(1, 0)
        page.show_prepared(-1)
        page.show_prepared(1)
        page.put("torn", 1)
        page.commit(2, 2)

    transaction = Transaction(state, NoCollectives())

    def step() -> None:
        """All that a step as a transaction costs, once its only write is known as such."""
        transaction.begin()
        early = transaction.before_write("optimizer", "optimizer")
        transaction.prepare(early=early)
        pattern = transaction.pattern
        transaction.count(pattern.number(), 1)
        transaction.commit()

    for _ in range(LEARNING_STEPS):
        step()

    def draw() -> None:
        batches.get(next(numbers), 0)
        batches.done()

    def private() -> None:
        page.write_private(next(numbers), encode_tree({**state.rank_private.tree(), **batches.private()}, "state"))

    def streams() -> None:
        for purpose in ("step", "forward"):
            rng.seed_everything(0, purpose, next(numbers), 0)

    def between() -> None:
        state.rank_private.see_code(next(numbers), transaction.see_code_between())

    wanted, entered, ready = happened.StepWanted(), happened.StepEntered(), happened.GradientsReady()
    kept, passed = happened.PrivateKept(), happened.BarrierPassed()

    def decisions() -> None:
        for event in (wanted, entered, ready, kept, passed, happened.StepFinished("")):
            worker.handle(event)

    streams_us = _median_us(streams)
    return {
        "stamps of the position page": _median_us(stamps),
        "random streams, seeded twice": streams_us,
        "the batch, without its data": round(max(0.0, _median_us(draw) - streams_us), 2),
        "the step as a transaction": _median_us(step),
        "rank-private state beside the page": _median_us(private),
        "nothing changed between two steps": _median_us(between),
        "decisions of the worker": _median_us(decisions),
        "lineage": _median_us(lambda: next_lineage("0" * 16, 1000, 4)),
        f"{GATES} gates in a backward pass of {BACKWARD_S * 1e3:.0f} ms": gates_us(GATES),
    }


def gates_us(count: int) -> float:
    """Open ones at so many parameters, as the difference of two backward passes that do next to nothing else."""
    parameters = [nn.Parameter(torch.ones(())) for _ in range(count)]

    def backward() -> None:
        torch.stack(list(parameters)).sum().backward()

    without = _median_us(backward, BACKWARDS)
    BackwardHooks(lambda _: None).place(parameters)
    return round(max(0.0, _median_us(backward, BACKWARDS) - without), 2)


def _median_us(work: Callable[[], object], calls: int = CALLS) -> float:
    times = []
    for _ in range(calls):
        started = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - started)
    return round(statistics.median(times[calls // 10 :]) / 1e3, 2)


# ---------------------------------------------------------------- the barrier


def barrier_us(workers: int) -> dict[str, float]:
    """Median time of the barrier between so many processes, as rank 0 sees it: with gloo alone, and as relight does."""
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe(duplex=False)
    memory = SharedBarrier.create(workers)
    memory_path = f"/proc/{os.getpid()}/fd/{memory}"
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as directory:
        store = str(Path(directory) / "store")
        ranks = [
            spawn.Process(target=_barriers, args=(store, rank, workers, far, memory_path), daemon=True)
            for rank in range(workers)
        ]
        for rank in ranks:
            rank.start()
        far.close()
        try:
            figures: dict[str, float] = near.recv()
        finally:
            for rank in ranks:
                rank.join(10.0)
                rank.kill()
            os.close(memory)
    return figures


def _barriers(
    path: str, rank: int, workers: int, link: multiprocessing.connection.Connection, memory_path: str
) -> None:
    torch.set_num_threads(1)
    group = make_generation_group(dist.FileStore(path, workers), rank, workers, "barrier", None)  # type: ignore[attr-defined]
    memory = SharedBarrier(os.open(memory_path, os.O_RDWR), workers)
    between_hosts, on_one_host = (
        GenerationGroup(group),
        GenerationGroup(group, local=SharedMemoryAllReduce(memory, 1, rank)),
    )

    def go_through(group: GenerationGroup) -> list[int]:
        wait = group.sum_over_ranks([1, 0, 0])
        return wait()

    numbers = torch.zeros(3, dtype=torch.int64)
    figures = {
        "gloo alone": _median_us(lambda: group.allreduce([numbers]).wait(), BARRIERS),
        "so that it can be broken off": _median_us(lambda: go_through(between_hosts), BARRIERS),
        "through memory that they share": _median_us(lambda: go_through(on_one_host), BARRIERS),
    }
    if rank == 0:
        link.send(figures)
    group.barrier().wait()


def main() -> None:
    torch.set_num_threads(1)
    model = build_model(0, SHAPE)
    parameters = list(model.parameters())
    parts = parts_us(model)
    figures = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "parts_us": parts,
        "own_us": round(sum(parts.values()), 2),
        "fence_us": {str(workers): barrier_us(workers) for workers in BARRIER_WORKERS},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
