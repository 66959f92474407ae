"""Makes a failing plan small: fewer faults, ranks, steps and blocks, as long as it fails in the same way."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.idioms.blocks.faults import is_in_script
from tests.idioms.blocks.plan import SIMPLEST, Plan, settle

Fails = Callable[[Plan], bool]


def shrink(plan: Plan, fails: Fails, tries: int = 60) -> Plan:
    """The smallest plan found that still fails: each candidate must do so twice."""
    seen = {plan}
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(plan):
            if candidate in seen:
                continue
            if tries <= 0:
                return plan
            seen.add(candidate)
            tries -= 1
            if fails(candidate) and fails(candidate):
                plan, smaller = candidate, True
                break
    return plan


def simpler(plan: Plan) -> Iterator[Plan]:
    """Yield plans to try, the greatest step first."""
    faults = plan.faults
    if len(faults) > 1:
        for fault in faults:
            yield replace(plan, faults=(fault,))
    for index in range(len(faults)):
        if len(faults) > 2:
            yield replace(plan, faults=faults[:index] + faults[index + 1 :])
    changed = [slot for slot, option in plan.choices if option != SIMPLEST[slot]]
    if len(changed) > 3:
        half = len(changed) // 2
        for part in (changed[:half], changed[half:]):
            yield from _without(plan, part)
    for slot in changed:
        yield from _without(plan, [slot])
    if plan.ranks > 2 and not any(_strikes_rank(fault, plan.ranks - 1) for fault in faults):
        yield replace(plan, ranks=2)
    if plan.ranks > 2:
        yield replace(plan, ranks=2, faults=tuple(_on_rank(fault, plan.ranks - 1, 1) for fault in faults))


def _without(plan: Plan, slots: list[str]) -> Iterator[Plan]:
    choices = settle({**dict(plan.choices), **{slot: SIMPLEST[slot] for slot in slots}})
    if choices != plan.choices:
        yield replace(plan, choices=choices)


def _strikes_rank(fault: str, rank: int) -> bool:
    return fault.startswith(f"{rank}.") if is_in_script(fault) else f"rank {rank} " in fault


def _on_rank(fault: str, rank: int, other: int) -> str:
    if is_in_script(fault):
        number, _, rest = fault.partition(".")
        return f"{other}.{rest}" if number == str(rank) else fault
    return fault.replace(f"rank {rank} ", f"rank {other} ")
