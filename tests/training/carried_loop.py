"""Offers steps as `relight.Training.steps` does, to scripts that need nothing else of a training run."""

import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from relight.script_files import adopt_caller
from relight.training.carried.carried import Carried
from relight.training.carried.values.parts import NoParts, Parts, is_part
from relight.training.state.handed.named import attributes_of_state
from relight.training.state.modules.references import References
from relight.training.state.modules.slots import Slots
from relight.transfer.io.codec import decode_tree, encode_tree

_NUMBERS = itertools.count()
_HANDED = (nn.Module, nn.Parameter, torch.optim.Optimizer)
STEPS = 6
EARLY_FROM = 2  # the first step whose barrier may stand before the end of the block


class Interrupted(Exception):
    """A failure elsewhere."""


class Step:
    def __init__(self, loop: "Loop", number: int, *, warmup: bool, fails: bool) -> None:
        self.loop, self.number, self.warmup, self.fails = loop, number, warmup, fails
        self.committed = False
        self.looked = -1  # before the last write

    def __enter__(self) -> float:
        self.loop.enter(self, sys._getframe(1))
        return 1.0 + self.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self.loop.exit(self, error)

    def point(self, number: int, *_: Any) -> None:
        """Stands where a failure may strike; what it is given decides what a step does."""
        if self.fails and number == self.loop.fails_in:
            raise Interrupted

    def write(self) -> None:
        """Stands before the last write of a step, where the barrier may stand."""
        if self.number >= EARLY_FROM and not self.warmup:
            carried = self.loop.carried
            self.looked = carried.look()
            kept = encode_tree(carried.capture(early=True), "private")
            if not self.fails:  # else it is withdrawn
                self.loop.kept_early[self.number + 1] = kept

    def end(self) -> None:
        """Stands at the end of the block, where a failure may strike last."""
        if self.fails:
            raise Interrupted


class Loop:
    """Offers steps as `relight.Training.steps` does, and is called `steps` in scripts."""

    def __init__(
        self,
        *,
        until: int = STEPS,
        fails_at: int = -1,
        fails_in: int = -1,
        goes_back: int = 0,
        begins_at: int = 0,
        tree: Any = None,
        recovers_at: int = -1,
    ) -> None:
        """`fails_at` is a step, `fails_in` the point of it, -1 for its end. A replacement begins with a `tree`.

        `recovers_at`: another rank is lost after its barrier of the step before. This one looks for reasons to doubt
        the bits before it asks for this step, as in a recovery.
        `goes_back`: so many steps more are computed again, from a snapshot.
        """
        self.until = until
        self.said: list[str] = []
        self.parts: Parts = NoParts()
        self._nets: dict[str, nn.Module] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._objects: list[Any] = []
        self.carried = Carried(self.is_foreign, lambda key, text: self.said.append(text), parts=self)
        self.fails_at, self.fails_in, self.begins_at, self.tree = fails_at, fails_in, begins_at, tree
        self.goes_back, self.moved, self.recovers_at = goes_back, "", recovers_at
        self.kept: list[bytes] = []  # of each version, as it was kept last
        self.kept_early: dict[int, bytes] = {}  # the same, as it was kept before the last write of a step
        self.doubt: str | None = None
        self.noticed: dict[str, int] = {}  # on the rank that a replacement copies from
        self.undone: list[str] = []  # what is told of a step that was undone, besides
        self.rolled_back: list[str | None] = []  # why one that is repeated may end otherwise
        self.risks: list[str] | None = None  # at the beginning of each step, if they are asked for

    def hand_over(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """For scripts, as `relight.Training` takes them."""
        name = str(len(self._nets))
        self._nets[name], self._optimizers[name] = net, optimizer
        self.parts = References(self._nets, self._optimizers, {}, Slots(self._nets))

    def hand_over_object(self, thing: Any) -> None:
        """For scripts: an object with a `state_dict`."""
        self._objects.append(thing)
        self.carried.look_into(thing, attributes_of_state(thing) or ())

    def name_of(self, value: Any) -> Any:
        return self.parts.name_of(value)

    def at(self, name: Any) -> Any:
        return self.parts.at(name)

    def owners(self) -> Iterator[tuple[Any, Any]]:
        return self.parts.owners() if self.parts is not self else iter(())

    def optimizers(self) -> Iterator[tuple[str, Any]]:
        return iter(self._optimizers.items())

    def is_foreign(self, thing: Any) -> bool:
        held = thing.values() if type(thing) is dict else thing if type(thing) in (list, tuple) else ()
        if is_part(self.parts, thing) or any(isinstance(one, _HANDED) and is_part(self.parts, one) for one in held):
            return True
        return (
            isinstance(thing, (Step, Loop))
            or any(thing is one for one in self._objects)
            or (isinstance(thing, types.GeneratorType) and thing.gi_code is Loop.__call__.__code__)
        )

    def __call__(self, until: int = 0) -> Iterator[Step]:
        adopt_caller(sys._getframe(1))
        until = until or self.until
        if self.tree is not None:
            self.turn(-1)
            yield Step(self, 0, warmup=True, fails=False)
            self.carried.roll_back()
            self.doubt = self.carried.adopt(self.tree, self.noticed, self.begins_at)
        numbers = list(range(self.begins_at, until))
        if self.goes_back:
            numbers[:] = [*range(self.begins_at, self.fails_at + 1), *range(self.fails_at - self.goes_back, until)]
        for at, number in enumerate(numbers):
            if number == self.fails_at and at == numbers.index(number):
                self.turn(number)
                yield Step(self, number, warmup=False, fails=True)
                if self.goes_back:
                    tree = decode_tree(self.kept[number - self.goes_back])
                    self.doubt = self.doubt or self.carried.adopt(tree, {}, number - self.goes_back)
                    continue
            self.turn(number)
            yield Step(self, number, warmup=False, fails=False)
        if self.risks is not None:
            self.risks.append(self.carried.doubts.risk(recovers=True))
        doubt = self.carried.turn(sys._getframe(1))  # for the code after the loop
        self.doubt = self.doubt or doubt or self.carried.end(computed=self.begins_at < until)
        self.carried.leave()

    def turn(self, number: int) -> None:
        if number == self.recovers_at:
            self.doubt = self.doubt or self.carried.doubts.risk(recovers=True)
        doubt = self.carried.turn(sys._getframe(2)) or self.carried.doubts.later()
        self.carried.compare(max(number, 0))
        if number >= 0 and self.carried.needs_keeping:
            self.keep(number)
        self.moved += self.carried.moved() or ""
        if self.risks is not None:
            self.risks.append(self.carried.doubts.risk(recovers=True))
        self.doubt = self.doubt or doubt
        self.carried.remember()

    def enter(self, step: Step, frame: Any) -> None:
        self.carried.enter(frame, step.number)

    def exit(self, step: Step, error: BaseException | None) -> bool:
        if step.warmup and error is None:
            return False  # undone when the loop asks for the next step
        if step.warmup or isinstance(error, Interrupted):
            if not step.warmup:
                self.doubt = self.doubt or self.carried.doubts.risk(recovers=True)
            lasting = self.carried.roll_back()
            if not step.warmup:
                self.doubt = self.doubt or lasting
                self.rolled_back.append(lasting)
                self.undone.append(self.carried.doubts.of_undone())
            return isinstance(error, Interrupted)
        if error is not None:
            return False
        if step.looked != self.carried.look():  # then the barrier stands at the end, or the survivors tell of it
            self.kept_early.pop(step.number + 1, None)
        if step.looked < 0 or step.number + 1 != self.recovers_at:  # else it was kept before the write, and not since
            self.keep(step.number + 1)
        self.carried.commit()
        step.committed = True
        return False

    def keep(self, version: int) -> None:
        del self.kept[version:]
        missing: list[bytes] = [encode_tree({}, "")] * (version - len(self.kept))
        self.kept += [*missing, encode_tree(self.carried.capture(), "private")]


def run_script(source: str, loop: Loop, directory: Path) -> Any:
    """Run a script that leaves its outcome in `result`."""
    path = directory / f"script{next(_NUMBERS)}.py"
    path.write_text(source)
    made = types.ModuleType("carried_script")
    vars(made).update(
        {"__file__": str(path), "steps": loop, "carry": loop.carried.declare, "hand_over": loop.hand_over}
    )
    sys.modules["carried_script"] = made
    exec(compile(source, str(path), "exec"), vars(made))
    return vars(made)["result"]
