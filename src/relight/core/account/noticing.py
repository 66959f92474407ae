"""The time for which a failure went unnoticed: exactly, where the fault was planned, else as it can be estimated. Pure.

No process sees a real fault strike. What is known of the process is its last sign of progress; what went by since then,
beyond the time that a step usually takes, is time in which the job got nowhere. It is called an estimate everywhere.
"""

from relight.core.protocol.position import IN_STEP, Position, usual_step_ns

PLANNED = "known: the fault was planned"
# Whatever an agent has to wait for before it gives a process up. All else is a death, which the kernel tells at once.
_WAITED_OUT = frozenset({"hang", "frozen"})
_DEATHS = frozenset({"ended", "killed", "exited", "out of memory"})


def detect_seconds(
    kind: str, position: Position, noticed_ns: int, waited_seconds: float = 0.0
) -> tuple[float | None, str]:
    """Seconds from the fault to its notice, and how they are known; (None, "") if nothing tells them.

    Args:
        kind: of the failure, as in `FailureReport`.
        position: the last one of the process, read from its page.
        noticed_ns: the notice, on the clock of the position's host; 0: not known.
        waited_seconds: for so long the failure itself was seen to last (stopped, silent, no rank's progress); 0.0: the
            position has to tell.
    """
    if 0 < position.fault_ns < noticed_ns:
        return (noticed_ns - position.fault_ns) / 1e9, PLANNED
    if waited_seconds > 0:
        return waited_seconds, "estimated: it was seen to last so long"
    if not 0 < position.stamp_ns < noticed_ns:
        return None, ""
    idle_ns, usual_ns = noticed_ns - position.stamp_ns, usual_step_ns(position)
    if kind in _WAITED_OUT:
        return max(0, idle_ns - usual_ns) / 1e9, "estimated: since its last progress, less a usual step"
    # A death goes unnoticed only while there is no agent to notice it. One in the code between two steps, in a first
    # step, or while it waited for slower ranks, tells nothing: how long that may take is not known.
    if kind in _DEATHS and position.phase in IN_STEP and usual_ns and idle_ns > 2 * usual_ns:
        return (idle_ns - usual_ns) / 1e9, "estimated: since its last progress, less a usual step"
    return None, ""
