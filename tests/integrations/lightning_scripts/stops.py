"""The Lightning example, stopped by a callback after eight optimizer steps of twelve."""

import importlib.util
from pathlib import Path

import lightning as L

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning" / "train.py"


class Stops(L.Callback):
    """Stops training after a step."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step >= 8:
            trainer.should_stop = True


def main():
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.EarlyStopping = lambda *_, **__: Stops()
    example.main()


if __name__ == "__main__":
    main()
