"""The process groups that a script makes, from `relight.init` on, in the process that holds them."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from relight.errors import RestoreError, StepInterrupted
from relight.training.collectives.generation_group import GenerationGroup
from relight.training.collectives.group import RelightProcessGroup
from relight.training.collectives.groups import Ranks
from relight.training.process.controller.orders import Superseded
from relight.training.process.runtime import Runtime
from relight.training.torch_private.distributed.c10d import adapt
from relight.training.torch_private.distributed.groups import name_group
from relight.training.torch_private.distributed.mesh import watch_groups

BACKEND = "relight"  # as c10d knows it


class ScriptGroups:
    """Makes each group, and forms it with its members unless this process is a standby."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def register(self, backend: str = BACKEND) -> None:
        """Have `dist.init_process_group(backend)` make the default group here."""
        devices = sorted({"cpu", self._runtime.device.type})
        dist.Backend.register_backend(backend, self._make_default, extended_api=True, devices=devices)

    def watch(self) -> None:
        """Follow what the script does with c10d's functions, once the default group is there."""
        adapt(self)
        watch_groups(self._runtime.groups.table.add)

    def is_own(self, group: Any) -> bool:
        """Return whether a group is one of relight's."""
        return isinstance(group, RelightProcessGroup)

    def is_detached(self, group: Any) -> bool:
        """Return whether a group of relight's has no peers at present."""
        return isinstance(group, RelightProcessGroup) and group.formed is not None and group.formed.is_detached

    def is_cut_off(self, group: Any) -> bool:
        """True if a recovery has taken the peers of a group of relight's, and this operation cannot be repeated."""
        return isinstance(group, RelightProcessGroup) and group.is_cut_off

    def meet(self, group: Any) -> bool:
        """A function of c10d needs a group that is cut off: return whether all ranks have come, and it is not any more.

        The first collective that it calls counts as the script's next one.
        """
        del group
        code_between = self._runtime.protection.code_between
        code_between.come("", (), 0)
        return code_between.meet()

    def note_cut(self, group: Any, operation: str) -> None:
        """A function of c10d does alone what it does with the peers of `group`, since these are gone."""
        del group
        self._runtime.protection.cut(operation)

    def make_group(self, members: Sequence[int], name: str, description: str | None) -> RelightProcessGroup | None:
        """Make a group for `dist.new_group`; None in a process that is no member.

        A standby that may take any rank holds every group.
        """
        runtime = self._runtime
        ranks = runtime.groups.table.normal(members)
        takes_any = runtime.is_standby and not runtime.builds_late
        if runtime.rank not in ranks and not takes_any:
            return None
        group = self._make(ranks, runtime.groups.table.newest)
        name_group(group, name, description)
        return group

    def _make_default(self, options: Any, _: Any = None) -> RelightProcessGroup:
        return self._make(self._runtime.groups.table.normal(options.global_ranks_in_group), 0)

    def _make(self, ranks: Ranks, number: int) -> RelightProcessGroup:
        runtime = self._runtime
        group = RelightProcessGroup(runtime.protection, ranks, runtime.device, number, self)
        same = next((other.formed for other in runtime.groups.all if other.ranks == ranks), None)
        if runtime.is_standby:
            group.detach()
        elif same is not None:
            group.attach(same)
        else:
            group.attach(self._form(ranks))
        runtime.groups.all.append(group)
        return group

    def _form(self, ranks: Ranks) -> GenerationGroup:
        """Form a group with its members.

        Raises StepInterrupted if a failure elsewhere was the cause, RestoreError if none was reported.
        """
        runtime = self._runtime
        forming = runtime.begin_forming(runtime.generation, [ranks])
        interrupted = StepInterrupted("a peer failed while a process group was formed with it")
        try:
            return runtime.orders.await_formed(forming, runtime.generation)[ranks]
        except Superseded:
            raise interrupted from None
        except RestoreError as error:
            if runtime.reports.await_stop(str(error)):
                raise interrupted from error
            raise
