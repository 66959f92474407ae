"""The Hugging Face example, stopped by a callback after six optimizer steps of twelve."""

import importlib.util
from pathlib import Path

from transformers import TrainerCallback

EXAMPLE = Path(__file__).parents[3] / "examples" / "huggingface" / "train.py"


class Stops(TrainerCallback):
    """Stops training after a step."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 6


def main():
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.EarlyStoppingCallback = lambda **_: Stops()
    example.main()


if __name__ == "__main__":
    main()
