"""The checkpoint engine for verl, made by verl's registry and called as its `CheckpointEngineManager` calls it.

Rollout workers are processes of their own, and are killed. Runs where verl is installed.
"""

import asyncio
import json
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import relight
from relight.errors import TransferError, UsageError
from tests.survival.harness import PATIENCE, PROGRAMS, plain_environment

base = pytest.importorskip("verl.checkpoint_engine.base", exc_type=ImportError)

SECONDS = 60.0 * PATIENCE
START_SECONDS = 200.0 * PATIENCE  # importing verl imports all that it can find
BUCKET = 40_000
Pairs = Iterator[tuple[str, torch.Tensor]]


def weights(step: int) -> dict[str, torch.Tensor]:
    """Some chunks, and a tensor that is larger than one."""
    generator = torch.Generator().manual_seed(step)
    small = {f"layers.{n}.weight": torch.randn(64, 64, generator=generator) for n in range(12)}
    return {**small, "head": torch.randn(300, 64, generator=generator).bfloat16(), "scale": torch.tensor(float(step))}


class Worker:
    """A rollout worker's process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "verl_rollout.py"), str(BUCKET)],
            env=plain_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def hear(self, seconds: float = SECONDS) -> str:
        output = self.process.stdout
        assert output is not None
        assert select.select([output], [], [], seconds)[0], "the worker says nothing"
        return output.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Worker]]:
    """Three rollout workers, of which a test may kill one."""
    started = [Worker() for _ in range(3)]
    for worker in started:
        worker.tell("prepare")
    for worker in started:
        worker.hear(START_SECONDS)
    yield started
    for worker in started:
        worker.kill()


@pytest.fixture
def workers(pool: list[Worker]) -> list[Worker]:
    """Two that live."""
    return [worker for worker in pool if worker.process.poll() is None][:2]


@pytest.fixture
def actor() -> Iterator[Any]:
    """The actor's rank 0."""
    import relight.integrations.verl as integration

    engine = base.CheckpointEngineRegistry.new(
        integration.BACKEND, bucket_size=BUCKET, is_master=True, timeout_seconds=SECONDS
    )
    yield engine
    engine.close()


def form(actor: Any, workers: Iterable[Worker]) -> None:
    """As `CheckpointEngineManager.build_process_group`, with one rank that only gathers."""
    workers = list(workers)
    metadata = [actor.prepare(), actor.prepare(), *(json.loads(worker.ask("prepare")) for worker in workers)]
    of_actor, of_workers = type(actor).build_topology(2, len(workers), metadata)
    assert [len(values) for values in of_actor.values()] == [2] * len(of_actor)
    actor.init_process_group(**{name: values[0] for name, values in of_actor.items()})
    for number, worker in enumerate(workers):
        worker.ask("init " + json.dumps({name: values[number] for name, values in of_workers.items()}))


def update(actor: Any, workers: Iterable[Worker], step: int) -> list[str]:
    """Send to all workers, and return what each got."""
    workers = list(workers)
    for worker in workers:
        worker.tell(f"receive {step}")
    asyncio.run(actor.send_weights(iter(weights(step).items()), global_steps=step))
    actor.finalize()
    return [worker.hear() for worker in workers]


def test_every_worker_gets_the_bits_of_every_update(actor: Any, workers: list[Worker]) -> None:
    for step in (1, 2, 3):
        form(actor, workers)
        assert update(actor, workers, step) == [relight.digest_weights(weights(step))] * 2


def test_a_worker_that_dies_in_an_update_is_left_out_and_its_successor_takes_part_in_the_next(
    actor: Any, pool: list[Worker]
) -> None:
    victim, survivor, successor = pool
    workers = [victim, survivor]
    form(actor, workers)
    assert update(actor, workers, 1) == [relight.digest_weights(weights(1))] * 2

    def tensors() -> Pairs:
        """The victim has its first tensor, and holds up the update; then it dies."""
        for number, pair in enumerate(weights(2).items()):
            if number == 8:  # chunks of two tensors: one was taken, one lies there, and the third is held back
                assert victim.hear() == "held"
                victim.kill()
            yield pair

    form(actor, workers)
    victim.tell("hold 2")
    survivor.tell("receive 2")
    asyncio.run(actor.send_weights(tensors(), global_steps=2))
    assert survivor.hear() == relight.digest_weights(weights(2))

    form(actor, [survivor, successor])
    assert update(actor, [survivor, successor], 3) == [relight.digest_weights(weights(3))] * 2


def test_a_worker_that_leaves_an_update_holds_up_nobody_and_gets_the_next(actor: Any, workers: list[Worker]) -> None:
    leaving, other = workers
    form(actor, workers)
    leaving.tell("drop 1")
    other.tell("receive 1")
    asyncio.run(actor.send_weights(iter(weights(1).items()), global_steps=1))
    assert leaving.hear() == "dropped after layers.0.weight"
    assert other.hear() == relight.digest_weights(weights(1))
    form(actor, workers)
    assert update(actor, workers, 2) == [relight.digest_weights(weights(2))] * 2


def test_an_actor_that_was_replaced_sends_to_the_same_workers(actor: Any, workers: list[Worker]) -> None:
    form(actor, workers)
    update(actor, workers, 5)
    actor.close()
    successor = type(actor)(BUCKET, timeout_seconds=SECONDS)
    try:
        form(successor, workers)
        assert update(successor, workers, 5) == [relight.digest_weights(weights(5))] * 2
    finally:
        successor.close()


def test_ranks_that_do_not_send_take_part_in_gathering(actor: Any) -> None:
    actor.init_process_group(role="idle", place="/nowhere", workers=["worker"])
    gathered = iter(weights(1).items())
    asyncio.run(actor.send_weights(gathered, global_steps=1))
    assert next(gathered, None) is None


def test_workers_that_are_not_there_are_counted(actor: Any) -> None:
    engine = type(actor)(BUCKET, timeout_seconds=0.1)
    try:
        engine.init_process_group(role="sender", place=engine.prepare()["place"], workers=["one", "other"])
        with pytest.raises(TransferError, match="0 of 2 rollout workers are connected"):
            asyncio.run(engine.send_weights(iter(weights(1).items()), global_steps=1))
    finally:
        engine.close()


def test_another_machine_is_refused_by_name(actor: Any) -> None:
    metadata = [{"host": f"node-{n}", "place": f"/tmp/{n}", "name": str(n)} for n in range(2)]
    with pytest.raises(UsageError, match="on node-0, and there are rollout workers on node-1"):
        type(actor).build_topology(1, 1, metadata)
