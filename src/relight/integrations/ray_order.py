"""`python -m relight.integrations.ray_order`: orders a host of Ray for a running job. `--supplier ray` is this command.

An order is an actor with a name, which runs `relight agent`. It waits until Ray has room for it, so Ray's autoscaler
hears of it. The controller calls this with RELIGHT_ACTION and the other variables of `--supplier`.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from relight.errors import UsageError
from relight.integrations.ray.jobs import Host, import_ray

NAMESPACE = "relight"


class _Ordered(Host):
    """An actor whose process is started with it, and not again if Ray has lost the node: then another is ordered."""

    def __init__(self, token: str, command: tuple[str, ...]) -> None:
        super().__init__(token)
        self.start(command)


def main(arguments: list[str]) -> int:
    """Place or cancel the order that is in the environment; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m relight.integrations.ray_order",
        description="Order a host of Ray for a job, or cancel the order: a command for `relight run --supplier`.",
    )
    parser.add_argument("--num-cpus", type=float, default=1.0, metavar="N", help="CPUs of a host; default 1")
    parser.add_argument("--num-gpus", type=float, default=0.0, metavar="N", help="GPUs of a host; default 0")
    asked = parser.parse_args(arguments)
    try:
        ray = _connect()
        if os.environ["RELIGHT_ACTION"] == "order":
            _order(ray, asked.num_cpus, asked.num_gpus)
        else:
            _cancel(ray)
    except (UsageError, ConnectionError, KeyError) as error:
        print(f"relight: {error}", file=sys.stderr)
        return 1
    return 0


def _connect() -> Any:
    ray = import_ray()
    address = os.environ.get("RAY_ADDRESS", "auto")
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    return ray


def _name() -> str:
    return f"relight-{os.environ['RELIGHT_JOB']}-{os.environ['RELIGHT_ORDER']}"


def _order(ray: Any, num_cpus: float, num_gpus: float) -> None:
    from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

    machines = os.environ["RELIGHT_EXCLUDE"].split(",")
    unwanted = [node["NodeID"] for node in ray.nodes() if node["NodeManagerHostname"] in machines]
    where = {"ray.io/node-id": NotIn(*unwanted)} if unwanted else {}
    command = ("agent", "--controller", os.environ["RELIGHT_CONTROLLER"], "--name", os.environ["RELIGHT_ORDER"])
    token = Path(os.environ["RELIGHT_TOKEN_FILE"]).read_text().strip()
    options = ray.remote(_Ordered).options(
        name=_name(),
        lifetime="detached",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        **({"scheduling_strategy": NodeLabelSchedulingStrategy(hard=where)} if where else {}),
    )
    options.remote(token, command)
    print(_name())


def _cancel(ray: Any) -> None:
    try:
        actor = ray.get_actor(_name())
    except ValueError:
        return  # it is gone
    ray.kill(actor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
