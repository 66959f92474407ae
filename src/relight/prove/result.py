"""The result of a proof, as one value: `relight prove --json` prints it, and people read its sentences. Pure."""

from pathlib import Path

import msgspec

from relight.chaos.plan import describe_fault
from relight.core.protocol.fault import Fault
from relight.prove.compare import Change, Difference, RankDifference
from relight.prove.names import Uses
from relight.words import count

EQUAL = "equal"
DIFFERENT = "different"
FAILED = "failed"  # the script, or a round of it, ended with an error
NOTHING = "nothing proven"  # no failure struck
_LISTED = 5


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt with failures."""

    number: int
    run_dir: str
    seconds: float
    faults: tuple[str, ...]  # as they were planned, in words
    struck: int
    recoveries: int
    steps_compared: int
    error: str = ""
    doubts: str = ""  # the reason why relight itself does not vouch for the bits
    difference: Difference | None = None


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `relight prove --json`."""

    format: int = 1
    script: str
    ranks: int
    steps: int
    seed: int
    run_dir: str
    verdict: str
    error: str = ""  # of the undisturbed run
    seconds: float = 0.0  # of that
    rounds: tuple[RoundResult, ...] = ()
    names: dict[str, Uses] = {}  # of the variables that differ: which lines change them


def verdict_of(error: str, rounds: tuple[RoundResult, ...]) -> str:
    """The verdict in one word or two."""
    if error:
        return FAILED
    if any(each.difference is not None for each in rounds):
        return DIFFERENT
    if any(each.error for each in rounds):
        return FAILED
    return EQUAL if any(each.struck and each.steps_compared for each in rounds) else NOTHING


def describe_faults(faults: tuple[Fault, ...]) -> tuple[str, ...]:
    return tuple(map(describe_fault, faults))


def explain_proof(proof: Proof) -> list[str]:
    """The verdict in paragraphs."""
    said = []
    if proof.error:
        said.append(f"Without any failure the script ended with an error: {proof.error}")
    for each in proof.rounds:
        if each.difference is not None:
            said += _explain_difference(proof, each, each.difference)
        if each.error:
            said.append(f"Round {each.number} ended with an error: {each.error}. Its files: {each.run_dir}")
        elif each.doubts:
            said.append(f"Round {each.number}: relight itself does not vouch for the bits, because {each.doubts}.")
    if proof.verdict == EQUAL:
        struck = count(sum(each.struck for each in proof.rounds), "failure")
        said.append(
            f"EQUAL: after {struck} in {count(len(proof.rounds), 'round')}, each of {proof.steps} steps left the bits "
            f"of the undisturbed run on all {proof.ranks} ranks."
        )
    elif proof.verdict == DIFFERENT:
        said.append("DIFFERENT: this script does not keep its bits through failures.")
    elif proof.verdict == FAILED:
        said.append("FAILED: this script does not live through failures.")
    else:
        said.append("NOTHING PROVEN: no failure struck; ask for more --steps or --rounds.")
    return said


def _explain_difference(proof: Proof, round_: RoundResult, difference: Difference) -> list[str]:
    if not difference.recovery:
        return [
            f"Round {round_.number} differs in step {difference.step}, before any failure struck: the script computes "
            f"something else each time it is started ({_tensors(difference.ranks)}). Seed what it draws, and leave out "
            "what depends on time."
        ]
    said = [
        f"Round {round_.number} differs from step {difference.step} on, after recovery {difference.recovery}: "
        f"{_tensors(difference.ranks)}."
    ]
    said += [f"At rank {d.rank}, {d.place}: {d.name} {d.what}{_after(d.after)}." for d in difference.divergences]
    for rank in difference.ranks:
        suspects = [c for c in rank.names if (uses := proof.names.get(c.name)) is None or uses.carried]
        said += [
            f"{_who(rank)}: {change.name} was {change.now} when the step began, instead of {change.before}"
            f"{_lines(proof, change)}."
            for change in suspects[:_LISTED]
        ]
        said += [f"{_who(rank)}: {c.name} was {c.now} instead of {c.before}." for c in rank.flags[:_LISTED]]
    if any(rank.names for rank in difference.ranks):
        said.append(
            "What a script carries from step to step must be handed over: relight.Training(name=object with "
            "state_dict), or per_rank={...} where it differs between ranks; or keep it in a buffer of the model."
        )
    return said


def _tensors(ranks: tuple[RankDifference, ...]) -> str:
    """List the tensors, and the ranks on which they differ."""
    changed = [rank for rank in ranks if rank.state]
    first = changed[0].state
    names = ", ".join(change.name for change in first[:_LISTED])
    more = f" and {len(first) - _LISTED} more" if len(first) > _LISTED else ""
    numbers = ", ".join(str(rank.rank) for rank in changed)
    return f"{names}{more}, on rank{'s' if len(changed) > 1 else ''} {numbers}"


def _who(rank: RankDifference) -> str:
    return f"Rank {rank.rank} ({rank.process}, {rank.role})"


def _after(place: str) -> str:
    return f"; up to {place} all was the same" if place else ""


def _lines(proof: Proof, change: Change) -> str:
    uses = proof.names.get(change.name)
    if uses is None or not uses.lines:
        return ""
    name = Path(proof.script).name
    return f" ({', '.join(f'{name}:{line}' for line in uses.lines[:_LISTED])})"
