"""Counts verdicts, by block too, as a table and as files of `benchmarks/results`."""

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.documents import RESULTS, Document, start_document, write_document
from benchmarks.figures import markdown_table
from tests.idioms.blocks.plan import Plan
from tests.idioms.blocks.trial import EQUAL, FAILURES, VERDICTS, Verdict


@dataclass
class Tally:
    """What came of all plans so far."""

    results: list[tuple[Plan, Verdict]] = field(default_factory=list)

    def add(self, plan: Plan, verdict: Verdict) -> None:
        """One more."""
        self.results.append((plan, verdict))

    @property
    def failed(self) -> int:
        """How many must not have ended so."""
        return sum(verdict.failed for _, verdict in self.results)

    @property
    def doubted(self) -> int:
        """How many ended equal although relight would not vouch for it."""
        return sum(verdict.word == EQUAL and bool(verdict.why) for _, verdict in self.results)

    def verdicts(self) -> dict[str, int]:
        """How many of each."""
        counts = Counter(verdict.word for _, verdict in self.results)
        return {word: counts[word] for word in VERDICTS if counts[word]}

    def blocks(self) -> dict[str, dict[str, int]]:
        """Verdicts of the scripts in which each block stands."""
        found: dict[str, Counter[str]] = {}
        for plan, verdict in self.results:
            for block in plan.blocks():
                found.setdefault(block, Counter())[verdict.word] += 1
        return {block: dict(found[block]) for block in sorted(found)}

    def table(self) -> str:
        """For people: totals, and the blocks that occur in failures, the most suspicious first."""
        lines = [", ".join(f"{count} {word}" for word, count in self.verdicts().items()) or "nothing was run"]
        if self.doubted:
            lines.append(f"  of {self.doubted} that were equal relight said that the bits are not known")
        rows = []
        for block, counts in self.blocks().items():
            bad = sum(counts.get(word, 0) for word in FAILURES)
            if bad:
                rows.append((bad / sum(counts.values()), bad, sum(counts.values()), block))
        for _, bad, all_of_them, block in sorted(rows, reverse=True):
            lines.append(f"  {bad} of {all_of_them} scripts with {block} failed")
        return "\n".join(lines)


def record(tally: Tally, jobs: int) -> None:
    """Write `benchmarks/results/composed.{json,md}`."""
    seeds = [plan.seed for plan, _ in tally.results]
    document = start_document(
        "composed", first_seed=min(seeds, default=-1), last_seed=max(seeds, default=-1), jobs=jobs
    )
    document["scripts"] = len(seeds)
    document["faults"] = sum(len(plan.faults) for plan, _ in tally.results)
    document["verdicts_by_word"] = tally.verdicts()
    document["doubted"] = tally.doubted
    document["blocks"] = tally.blocks()
    document["failures"] = [
        {"seed": plan.seed, "verdict": verdict.word, "blocks": plan.blocks(), "faults": list(plan.faults)}
        for plan, verdict in tally.results
        if verdict.word != EQUAL
    ]
    write_document(document, _render, RESULTS / "composed.json")


def _render(document: Document) -> str:
    settings, counts = document["settings"], document["verdicts_by_word"]
    head = (
        f"{document['scripts']} scripts composed at random (seeds {settings['first_seed']} to "
        f"{settings['last_seed']}), {document['faults']} faults, {settings['jobs']} jobs. Each script ran undisturbed "
        "and disturbed; *equal*: every rank ended with the same parameters, buffers, optimizer and carried values. "
        f"Of {document['doubted']} of these relight said that their bits are not known."
    )
    verdicts = markdown_table(["verdict", "scripts"], [[word, str(count)] for word, count in counts.items()])
    rows = [[block, str(sum(c.values())), str(c.get(EQUAL, 0))] for block, c in document["blocks"].items()]
    failures = [
        [str(f["seed"]), f["verdict"], " ".join(f["blocks"]), "; ".join(f["faults"])] for f in document["failures"]
    ]
    parts = [head, verdicts, markdown_table(["block", "scripts", "equal"], rows)]
    if failures:
        parts.append(markdown_table(["seed", "verdict", "blocks", "faults"], failures))
    return "\n\n".join(parts)
