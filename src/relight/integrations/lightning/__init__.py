"""Lightning's `Trainer` and `Fabric`, surviving failures: name the strategy, and start the script with `relight run`.

    trainer = Trainer(strategy="relight", devices=2, ...)

Under `relight run` the name is known once Lightning is imported. Elsewhere, `import relight.integrations.lightning`
makes it known: there it trains as `strategy="ddp"` does.
"""

from relight.integrations.lightning.strategy import FabricRelightStrategy, RelightStrategy, register

__all__ = ["FabricRelightStrategy", "RelightStrategy", "register"]
