"""A driver that calls `relight.init()` in workers of Ray Train and in an actor, as verl has them: ADDRESS DIRECTORY."""

import re
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def loop() -> None:
    """Join a job of relight, in `train_loop_per_worker`."""
    import relight

    relight.init()


class Worker:
    """An actor that trains."""

    def train(self) -> None:
        """Join a job of relight."""
        loop()


def words(error: BaseException) -> str:
    """Return what the refusal says to do."""
    found = re.search(r"Instead of .* in the driver", str(error).replace("\n", " "))
    return found.group(0) if found else str(error)


address, directory = sys.argv[1:]
ray.init(address=address)
try:
    TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=directory)).fit()
except Exception as error:
    print("trainer:", words(error), flush=True)
try:
    ray.get(ray.remote(num_cpus=0)(Worker).remote().train.remote())
except ray.exceptions.RayTaskError as error:
    print("actor:", words(error), flush=True)
