"""Optimizers and schedulers: private marks that they leave on each other."""

from torch.optim import Optimizer


def has_attached_scheduler(optimizer: Optimizer) -> bool:
    """Return whether a learning-rate scheduler was made for this optimizer; such a scheduler wraps its `step`."""
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))
