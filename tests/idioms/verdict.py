"""The verdict on a disturbed job of the library, from the files that it left."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_LINE = re.compile(r"digest rank=(\d+) (\w+)(.*)")


class Verdict(StrEnum):
    """The best first."""

    EQUAL = "equal"  # the bits of the undisturbed job
    REFUSED = "refused"  # before anything was trained, in relight's own words
    TOLD = "told"  # other bits, and the report says that they are not known; or ended with relight's words why
    SILENT = "SILENT"  # status 0, other bits, and nothing told
    LOST = "LOST"  # the job failed

    @property
    def is_failure(self) -> bool:
        return self in (Verdict.SILENT, Verdict.LOST)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of one job, from the files that it left."""

    status: int
    digests: Mapping[int, str]  # of each rank, as `finish` printed it
    steps: int  # committed
    failures: int
    bits: str  # "yes", "not known", or empty where relight does not say
    words: str = ""  # why it ended, or why the bits are not known
    usage: bool = False  # relight refused what the script does
    late: bool = False  # a rank was killed after its last step, where no other can take its place
    left: str = ""  # processes that were still there afterwards, failures that were not planned


def digests_in(output: str) -> dict[int, str]:
    """The last line of each rank: a rank that was replaced at its very end prints two."""
    return {int(found[1]): found[2] + found[3].rstrip() for found in _LINE.finditer(output)}


def sections(output: str) -> dict[str, str]:
    """Output of `python -m tests.idioms.plain` for each script."""
    parts = re.split(r"(?m)^(\w+): status (-?\d+) after .*$", output)
    return {
        name: text for name, status, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True) if status == "0"
    }


def judge(ending: Ending, undisturbed: Mapping[int, str]) -> tuple[Verdict, str]:
    """The verdict, and what there is to say about it."""
    if ending.late:
        expected = {rank: words for rank, words in undisturbed.items() if rank in ending.digests}
        if ending.digests == expected:
            return Verdict.EQUAL, "killed once more after the last step"
        verdict = Verdict.TOLD if ending.bits == "not known" else Verdict.SILENT
        return verdict, f"{what_differs(ending.digests, expected)}: {ending.words}"
    if ending.status:
        if ending.usage:
            return (Verdict.TOLD if ending.steps else Verdict.REFUSED), ending.words
        return Verdict.LOST, ending.words
    if ending.digests == undisturbed:
        return Verdict.EQUAL, ending.words if ending.bits == "not known" else ""
    differences = what_differs(ending.digests, undisturbed)
    if ending.bits == "not known":
        return Verdict.TOLD, f"{differences}: {ending.words}"
    return Verdict.SILENT, differences


def what_differs(found: Mapping[int, str], expected: Mapping[int, str]) -> str:
    """Ranks, and the things of each that differ."""
    said = []
    for rank in sorted({*found, *expected}):
        if rank not in found or rank not in expected:
            said.append(f"rank {rank} printed {'nothing' if rank not in found else 'more than expected'}")
        elif found[rank] != expected[rank]:
            things = sorted(
                {word.partition("=")[0] for word in {*found[rank].split()} ^ {*expected[rank].split()} if "=" in word}
            )
            said.append(f"rank {rank}: {', '.join(things)}")
    return "; ".join(said)
