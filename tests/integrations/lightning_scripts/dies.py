"""The example's training, in which rank 0 kills itself once, in the hook and on the call that the arguments name."""

import os
import signal
import sys
from pathlib import Path

import lightning as L
from lightning.fabric.plugins.io import TorchCheckpointIO

sys.path.insert(0, str(Path(__file__).parents[3]))
from examples.lightning import train


class Dies(L.Callback):
    def __init__(self, hook, calls, mark):
        self.hook = hook
        self.left = calls
        self.mark = mark
        setattr(self, hook, self.look)

    def look(self, trainer, *args, **kwargs):
        if trainer.sanity_checking:
            return
        self.left -= 1
        if self.left == 0 and trainer.is_global_zero and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class DiesAfterSaving(TorchCheckpointIO):
    def __init__(self, mark):
        self.mark = Path(mark)

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        if checkpoint["global_step"] == 6 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Trainer(L.Trainer):
    def __init__(self, callbacks, **options):
        if hook == "saved":
            super().__init__(callbacks=callbacks, plugins=[DiesAfterSaving(mark)], **options)
        else:
            super().__init__(callbacks=[*callbacks, Dies(hook, int(calls), mark)], **options)


hook, calls, mark = sys.argv[1:4]
sys.argv[1:4] = []
train.L.Trainer = Trainer
train.main()
