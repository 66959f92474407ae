"""The fuzzer that composes idioms: what it writes, how it judges, how it makes things small, and one seed of it."""

import ast
import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from relight.chaos.plan import parse_fault
from tests.idioms.blocks.faults import draw_faults, is_in_script
from tests.idioms.blocks.plan import RULES, SIMPLEST, SLOTS, Plan, compose, settle
from tests.idioms.blocks.render import places, render
from tests.idioms.blocks.shrink import shrink
from tests.idioms.blocks.tally import Tally
from tests.idioms.blocks.trial import EQUAL, LOST, SILENT, TOLD, Doubt, Report, Run, Trials, Verdict, compare
from tests.idioms.compose import plan_of

SEEDS = range(300)


def plain(**choices: str) -> Plan:
    """A plan of two ranks."""
    return Plan(seed=1, ranks=2, steps=8, choices=settle(choices))


def run(status: int = 0, *, bits: str = "'model': 'aa', 'ema': 'bb'", doubts: tuple[Doubt, ...] = ()) -> Run:
    """Return how a job of one rank ended."""
    return Run(status, {0: (f"{{{bits}}}",)}, Report(doubts=doubts), "", 1.0)


def test_the_same_seed_gives_the_same_script_and_faults() -> None:
    assert [(plan_of(seed), render(plan_of(seed))) for seed in range(20)] == [
        (plan_of(seed), render(plan_of(seed))) for seed in range(20)
    ]
    assert len({render(plan_of(seed)) for seed in SEEDS}) == len(SEEDS)


def test_every_script_compiles_and_every_block_occurs() -> None:
    seen = set()
    for seed in SEEDS:
        plan = compose(seed)
        ast.parse(render(plan))
        seen |= set(plan.choices)
    assert {(slot, option) for slot, options in SLOTS.items() for option in options} - seen == set()


def test_no_plan_breaks_a_rule_also_after_it_was_settled() -> None:
    for seed in SEEDS:
        chosen = dict(compose(seed).choices)
        for slot, is_nonsense in RULES:
            assert not is_nonsense(chosen) or chosen[slot] == SIMPLEST[slot], (seed, slot)


def test_faults_are_of_steps_and_places_that_the_script_has() -> None:
    for seed in SEEDS:
        plan = plan_of(seed)
        known = places(render(plan))
        steps = [int(found[-1]) for fault in plan.faults if (found := re.findall(r"(?:step |^\d\.)(\d+)", fault))]
        assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(steps)), plan
        for fault in plan.faults:
            if is_in_script(fault):
                rank, step, place = fault.split(".")
                assert int(rank) < plan.ranks
                assert int(step) < plan.steps
                assert place in known
            else:
                parse_fault(fault)
    assert len(draw_faults(compose(1), ["start"], random.Random(1))) >= 3


def test_shrinking_keeps_what_fails_and_drops_the_rest() -> None:
    plan = replace(
        plain(net="batchnorm", wrapper="ddp-view", ema="averaged", carried="deque", between="print", clip="norm"),
        ranks=3,
        faults=("1.2.start", "kill rank 2 in FORWARD of step 4", "0.6.end"),
    )

    def fails(candidate: Plan) -> bool:
        has_both = candidate["ema"] == "averaged" and candidate["net"] == "batchnorm"
        return has_both and any("FORWARD" in fault for fault in candidate.faults)

    smallest = shrink(plan, fails)
    assert smallest.blocks() == ["net=batchnorm", "ema=averaged"]
    assert smallest.faults == ("kill rank 1 in FORWARD of step 4",)
    assert smallest.ranks == 2


def test_shrinking_stops_after_its_tries_and_asks_twice() -> None:
    plan, asked = replace(plain(net="conv", clip="norm"), faults=("0.1.start",)), []

    def once(candidate: Plan) -> bool:
        asked.append(candidate)
        return asked.count(candidate) == 1

    assert shrink(plan, once) == plan
    assert shrink(plan, lambda candidate: True, tries=0) == plan


@pytest.mark.parametrize(
    ("found", "word", "why"),
    [
        (run(), EQUAL, ""),
        (run(bits="'model': 'aa', 'ema': 'cc'"), SILENT, "rank 0: ema"),
        (run(bits="'model': 'cc', 'ema': 'bb'", doubts=(Doubt("a collective was cut"),)), TOLD, "rank 0: model"),
        (Run(0, {}, Report(), "", 1.0), SILENT, "rank 0 printed nothing"),
        (run(2), LOST, "status 2"),
    ],
)
def test_verdicts(found: Run, word: str, why: str) -> None:
    verdict = compare(run(), found)
    assert verdict.word == word
    assert why in verdict.why


def test_the_table_names_the_blocks_of_failures() -> None:
    tally = Tally()
    tally.add(plain(net="conv"), Verdict(SILENT))
    tally.add(plain(net="rnn", clip="norm"), Verdict(EQUAL))
    assert tally.failed == 1
    assert tally.table().splitlines() == ["1 equal, 1 SILENT", "  1 of 1 scripts with net=conv failed"]
    assert tally.blocks()["clip=norm"] == {EQUAL: 1}


def test_one_script_end_to_end(tmp_path: Path) -> None:
    plan = replace(
        plain(net="batchnorm", optimizer="adamw", schedule="cosine", draws="all", scope="module"),
        faults=("1.2.forward", "kill rank 0 in OPTIMIZER of step 5"),
    )
    verdict = Trials(tmp_path).judge(plan)
    assert verdict == Verdict(EQUAL), verdict
