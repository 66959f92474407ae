"""Facts that the keys of `sameness.py` leave out of a situation, and why nothing that follows depends on them."""

# What is left out, and why nothing that follows depends on it. A test demands that all else is mentioned below.
LEFT_OUT = {
    "Controller": {
        **dict.fromkeys(("settings", "kinds"), "the same throughout a search"),
        "_extended": "of sleep, which does not occur",
    },
    "Job": {
        **dict.fromkeys(("settings", "until", "shards", "coverage"), "the same throughout a search"),
        **dict.fromkeys(("buddy_every", "checkpoint_every", "fallback"), "of fallback tiers"),
        **dict.fromkeys(("ended", "job_stats", "tracebacks", "began_at"), "an account for people"),
        "hosts": "of hosts, which do not come and go",
        "orders": "of ordered hosts, which do not occur",
    },
    "Attempts": {"_announced": "an account for people"},
    "Reserve": {
        "_errors": "far below its limit",
        "_slowest_start_seconds": "patience_seconds is what it is for",
    },
    "Starting": {"entered": "done with when training begins", "_restarts": "far below its limit"},
    "Saving": {"_ending": "of checkpoints, which are not kept"},
    "Breaker": dict.fromkeys(("_at_step", "_alike"), "far below its limit"),
    "Failing": {"recovery_step": "an account for people"},
    "Deciding": {"_history": "of fallback tiers", "_starts": "far below its limit"},
    "Draining": {"ordered_in": "of hosts that are drained, which does not occur"},
    "Supplying": dict.fromkeys(
        ("_most", "_refused", "_retry_at", "_last_reason"), "of ordered hosts, which do not occur"
    ),
    "Shutdown": {"reason": "of a signal, which does not occur"},
    "Repeating": {"standing_order": "of restarts, which do not occur"},
    "Process": {
        **dict.fromkeys(("agent", "slot"), "there is one host"),
        **dict.fromkeys(("pid", "fresh"), "an account for people"),
        **dict.fromkeys(("slow", "leaving"), "of slow ranks, which do not occur"),
        "instead_of": "of hosts that join, which does not occur",
        "started": "for the controller's restart, which does not occur",
        "failed_at_step": "counts what failed alike, far below its limit",
    },
    "Members": {
        "_next_name": "names do not matter",
        **dict.fromkeys(("_names", "_left"), "follows from _holders"),
        "_forgettable": "dead, and no rank's predecessor",
    },
    "SimulatedAgent": {
        "host": "there is one",
        "table": "for its successor, of which there is none",
        "hold": "reports do not wait for each other",
        "decisions": "described by its parts",
    },
    "Host": {
        "_live": "follows from the workers, whose ends are seen at once",
        "_started": "no order to start is given twice",
        **dict.fromkeys(("_gathering", "_holds"), "reports do not wait for each other"),
    },
    "SimulatedWorker": {
        **dict.fromkeys(("name", "world", "ticket"), "names do not matter"),
        **dict.fromkeys(("resume_on_thaw", "stalled", "waits_on"), "of thawing and patience, which do not occur"),
        "asked_in": "of scripts that leave their loops, which do not occur",
        "lower": "fallback tiers, which do not occur",
        **dict.fromkeys(("next_private", "content", "last_report"), "follows from the rest where it is read"),
        "machine": "described by its parts",
    },
    "Worker": {
        "rank": "names do not matter",
        **dict.fromkeys(("until", "cap", "last", "left", "wind_down_in"), "the same throughout a search"),
        **dict.fromkeys(("history", "was_there"), "of fallback tiers, which do not occur"),
        **dict.fromkeys(("agreed", "sound"), "of corrupted memory, which does not occur"),
        "has_failed": "of scripts that raise, which do not occur",
        **dict.fromkeys(("attempt", "begun_before", "commits", "torn_by", "wrote"), "an account for people"),
        "lineage": "follows from the state",
    },
    "Page": {
        **dict.fromkeys(("collectives", "progress", "stamp_ns", "commits"), "for the detector, which does not look"),
        **dict.fromkeys(("generation", "step", "prepared"), "evidence for people"),
        "asked_to_leave": "of slow ranks, which do not occur",
    },
}
