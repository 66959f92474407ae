"""The pace at which agents report on their workers: no faster than one controller can listen.

Deaths are events, said at once, and so is a process that was stopped; samples only serve to notice hangs, whose
time-outs are tens of seconds, and people. So with many agents each of them says less, and a hang is noticed at most two
samples later. See decisions/0010.
"""

SAMPLE_SECONDS = 0.5  # of few agents: more often costs training more than it tells
SAMPLES_PER_SECOND = 2500  # in all, of many
TRACED_RANKS = 512  # whose phases are kept for the timeline
JUDGED_PER_SECOND = 5000  # ranks that are compared with one another, to find whom the others wait for
JUDGE_SECONDS = 2.0  # but so often at least


def sample_seconds(agents: int) -> float:
    """The time between two samples of one agent. Doubles, so that it seldom changes while agents join."""
    seconds = SAMPLE_SECONDS
    while agents > SAMPLES_PER_SECOND * seconds:
        seconds *= 2
    return seconds


def judge_seconds(ranks: int) -> float:
    """The least time between two looks at all ranks of a job: with each sample of few agents, not of many."""
    return min(JUDGE_SECONDS, ranks / JUDGED_PER_SECOND)
