"""Counts verdicts, by block too, as a table and as files of `benchmarks/results`."""

from collections import Counter
from pathlib import Path

import msgspec

from benchmarks.documents import RESULTS, Document, start_document, write_document
from benchmarks.figures import markdown_table
from tests.idioms.blocks.plan import Plan
from tests.idioms.blocks.trial import EQUAL, FAILURES, VERDICTS, Verdict


class Result(msgspec.Struct, frozen=True):
    """The result of one plan."""

    seed: int
    verdict: str
    doubted: bool  # relight said that the bits are not known
    blocks: tuple[str, ...]
    faults: tuple[str, ...]


class Tally:
    """The results of all plans so far."""

    def __init__(self, file: Path | None = None) -> None:
        """`file` is one of lines: what it holds is taken over, and every further result is appended to it."""
        self._file = file
        lines = file.read_bytes().splitlines() if file is not None and file.exists() else []
        self.results = [msgspec.json.decode(line, type=Result) for line in lines]

    def add(self, plan: Plan, verdict: Verdict) -> None:
        """One more."""
        result = Result(plan.seed, verdict.word, bool(verdict.why), tuple(plan.blocks()), tuple(plan.faults))
        self.results.append(result)
        if self._file is not None:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")

    @property
    def failed(self) -> int:
        """The number that must not have ended so."""
        return sum(result.verdict in FAILURES for result in self.results)

    @property
    def doubted(self) -> int:
        """The number that ended equal although relight would not vouch for it."""
        return sum(result.verdict == EQUAL and result.doubted for result in self.results)

    def verdicts(self) -> dict[str, int]:
        """The number of each."""
        counts = Counter(result.verdict for result in self.results)
        return {word: counts[word] for word in VERDICTS if counts[word]}

    def blocks(self) -> dict[str, dict[str, int]]:
        """Verdicts of the scripts in which each block stands."""
        found: dict[str, Counter[str]] = {}
        for result in self.results:
            for block in result.blocks:
                found.setdefault(block, Counter())[result.verdict] += 1
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


def record(tally: Tally, note: str = "") -> None:
    """Write `benchmarks/results/composed.{json,md}`. `note`: which scripts ran at which commit, if not all at one."""
    seeds = [result.seed for result in tally.results]
    document = start_document(
        "composed", first_seed=min(seeds, default=-1), last_seed=max(seeds, default=-1), note=note
    )
    document["scripts"] = len(seeds)
    document["faults"] = sum(len(result.faults) for result in tally.results)
    document["verdicts_by_word"] = tally.verdicts()
    document["doubted"] = tally.doubted
    document["blocks"] = tally.blocks()
    document["failures"] = [
        {"seed": result.seed, "verdict": result.verdict, "blocks": result.blocks, "faults": result.faults}
        for result in tally.results
        if result.verdict != EQUAL
    ]
    write_document(document, _render, RESULTS / "composed.json")


def _render(document: Document) -> str:
    settings, counts = document["settings"], document["verdicts_by_word"]
    head = (
        f"{document['scripts']} scripts composed at random (seeds {settings['first_seed']} to "
        f"{settings['last_seed']}), {document['faults']} faults. Each script ran undisturbed "
        "and disturbed; *equal*: every rank ended with the same parameters, buffers, optimizer and carried values. "
        f"Of {document['doubted']} of these relight said that their bits are not known. {settings.get('note', '')}"
    ).strip()
    verdicts = markdown_table(["verdict", "scripts"], [[word, str(count)] for word, count in counts.items()])
    rows = [[block, str(sum(c.values())), str(c.get(EQUAL, 0))] for block, c in document["blocks"].items()]
    failures = [
        [str(f["seed"]), f["verdict"], " ".join(f["blocks"]), "; ".join(f["faults"])] for f in document["failures"]
    ]
    parts = [head, verdicts, markdown_table(["block", "scripts", "equal"], rows)]
    if failures:
        parts.append(markdown_table(["seed", "verdict", "blocks", "faults"], failures))
    return "\n\n".join(parts)
