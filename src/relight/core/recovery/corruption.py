"""Silent corruption: replicas of one version hold different bits, and no device has noticed anything.

Only a majority tells which of them is right, as in the replicated state machines of Schneider (1990,
section 4): with three replicas one may be wrong, with two it is only known that one is.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence


def outvoted(digests: Mapping[int, int | str], voters: Collection[int]) -> tuple[int, ...] | None:
    """Ranks whose state is not that of the majority.

    Args:
        digests: of the same version of the same state, by rank.
        voters: ranks that came to their state by themselves. One that was copied from others says nothing new.

    Returns:
        The ranks, none if all agree; None if no state is held by two voters and by more than half of them. One voter
        is no majority: if its copy differs from it, either of the two may have changed since.
    """
    if len(set(digests.values())) == 1:
        return ()
    votes = Counter(digests[rank] for rank in voters)
    digest, count = max(votes.items(), key=lambda vote: vote[1], default=("", 0))
    if count < 2 or 2 * count <= len(voters):
        return None
    return tuple(rank for rank in sorted(digests) if digests[rank] != digest)


def describe_difference(
    digests: Mapping[int, int | str],
    version: int,
    tensors: Sequence[str] = (),
    *,
    majority: bool = False,
    doubts: str = "",
) -> str:
    """Describe the holders of each state, for a job that must end. The script is the usual cause, so memory comes last.

    Args:
        digests: of the same version of the same state, by rank.
        tensors: the first that differ, if that is known.
        majority: whether it would be known which is right.
        doubts: reasons to doubt the bits since an earlier failure, in one clause; empty: none.
    """
    holders: dict[int | str, list[int]] = {}
    for rank, digest in sorted(digests.items()):
        holders.setdefault(digest, []).append(rank)
    unknown = "" if majority else ", and no majority tells which is right"
    first = f" (first in {', '.join(tensors)})" if tensors else ""
    groups = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in holders.values()]
    differs = f"the state of version {version} differs between {'; '.join(groups)}{unknown}{first}"
    if doubts:
        return f"{differs}. Most likely since a failure struck where ranks cannot be kept alike: {doubts}"
    return (
        f"{differs}. Was the model wrapped in DDP on every rank, and trained through it? Does something that was "
        "handed over differ by rank (hand it over in per_rank={...}, or not at all if it is an object of your own: "
        "such are carried), do draws decide that differ by rank (as they do, also after torch.manual_seed: "
        "docs/TRAINING.md, Random streams), or does a rank skip optimizer.step()? If not, memory of a device was "
        "corrupted"
    )
