"""Every error a user of relight can meet. Each message says what happened, the evidence, and what to do."""


class RelightError(Exception):
    """Base of all errors raised by relight."""


class UsageError(RelightError, ValueError):
    """The script or the command line asks for something that cannot work; the message says what to change."""


class MissingInterfaceError(UsageError):
    """The installed torch lacks private interfaces that relight needs."""


class StepInterrupted(RelightError):
    """Raised inside a step whose generation was closed by a failure elsewhere; `with step` absorbs it.

    Let it pass: a script that catches it keeps the worker from stopping.
    """


class ProtocolError(RelightError):
    """A peer said something that the protocol does not allow; the connection is closed."""


class RestoreError(RelightError):
    """A transfer of state failed or its digest did not match; the target stays blank and is restored anew."""


class CheckpointError(RelightError):
    """A checkpoint cannot be read or used; the message says which, and why."""


class MissingPartsError(UsageError):
    """No rank holds some bytes of divided weights, perhaps only for now."""


class TransferError(RelightError):
    """Weights could not be moved; the receiver keeps the version that it has."""


class PlaceTakenError(TransferError):
    """Another publisher listens where this one should, or one that is about to die still does."""


class StaleWeightsError(TransferError):
    """An engine's update in place broke off: its weights are a mixture, and it must not answer with them."""
