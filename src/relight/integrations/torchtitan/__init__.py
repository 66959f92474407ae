"""torchtitan's trainer, surviving failures: start this module with `relight run` in place of `torchtitan.train`.

    relight run --nproc-per-node 4 --standby 1 -m relight.integrations.torchtitan --module llama3 --config ...

A script of your own takes the class from here, `from relight.integrations.torchtitan import Trainer`, and builds it
from `Trainer.Config`. Without `relight run` it trains as torchtitan's own does.
"""

from relight.integrations.torchtitan.trainer import Trainer, main

__all__ = ["Trainer", "main"]
