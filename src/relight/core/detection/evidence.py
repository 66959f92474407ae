"""The detector's evidence in words, for people."""

from collections.abc import Mapping, Sequence

from relight.core.detection.sampling import Watch
from relight.core.protocol.position import IN_STEP, Phase, Position, usual_step_ns


def hint(watch: Watch, longest_ns: int) -> str:
    """Say where a limit comes from, or how to raise it. `longest_ns`: such a phase so far."""
    if watch.position.phase is Phase.OUTSIDE:
        return "; --outside-hang-timeout-seconds raises it"
    if watch.position.phase is Phase.STARTING or not watch.committed:
        return " up to the end of the first step; --startup-timeout-seconds raises it"
    return f"; the longest such phase so far took {seconds(longest_ns)}" if longest_ns else ""


def beyond_a_step(watch: Watch) -> float:
    """For how many seconds it has got nowhere, beyond the time of a usual step."""
    return max(0, watch.idle_ns - usual_step_ns(watch.position)) / 1e9


def seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.1f} s"


def where(position: Position) -> str:
    if position.phase in IN_STEP:
        return f"{position.phase.name} of step {position.step}"
    if position.phase is Phase.OUTSIDE:
        return f"OUTSIDE (the code before step {position.version})"
    return position.phase.name


def waiting(ahead: Mapping[int, Watch]) -> str:
    """ "ranks 0, 1 and 3 wait in BARRIER and rank 2 waits in BACKWARD"."""
    phases: dict[Phase, list[int]] = {}
    for rank, watch in sorted(ahead.items()):
        phases.setdefault(watch.position.phase, []).append(rank)
    return " and ".join(
        f"rank {ranks[0]} waits in {phase.name}" if len(ranks) == 1 else f"ranks {_list(ranks)} wait in {phase.name}"
        for phase, ranks in phases.items()
    )


def rank_list(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list(ranks)}"


def _list(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
