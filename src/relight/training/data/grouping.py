"""The batches that a step gets, where one step takes several. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Groups:
    """Groups of `size` batches, counted from the start of training.

    With `epoch`, the number of batches of an epoch, no group reaches into the next epoch: an epoch's last group has the
    batches that are left.
    """

    size: int
    epoch: int = 0

    def first(self, step: int) -> int:
        """The number of the first batch of a step."""
        if not self.epoch:
            return step * self.size
        epoch, place = divmod(step, self.steps_in_an_epoch)
        return epoch * self.epoch + place * self.size

    def count(self, step: int) -> int:
        """Return the number of batches that a step gets."""
        return min(self.size, self.epoch - self.first(step) % self.epoch) if self.epoch else self.size

    @property
    def steps_in_an_epoch(self) -> int:
        """The number of groups that an epoch is divided into."""
        return -(-self.epoch // self.size)
