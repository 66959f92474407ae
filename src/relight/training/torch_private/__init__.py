"""Every private interface of torch that relight uses, as on the releases that `installed.TESTED` names.

Nothing else may touch one (checks/torch_names.py).

Tests of the same names exercise each against the installed version, so that an upgrade that moves one of them fails
there, by name, and not in a recovery. One that no job can do without is looked for before any module here is imported.
"""

from relight.training.torch_private.installed import refuse_missing

refuse_missing()
