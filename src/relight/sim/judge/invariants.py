"""The invariants of every job, in words. checker.py and journal.py name these in their verdicts; the docs list them."""

INVARIANTS = {
    "I1": "Every version has one content: that of a run which nothing disturbs, at every step, resume and at the end.",
    "I2": "Each step is applied once, in order; at most the step in flight is repeated.",
    "I3": "The same as I1 of every rank's private state.",
    "I4": "A collective, a rendezvous, a copy mixes neither generations nor steps.",
    "I5": "A rank is sent only to a version that it can reach, and resumes only once every rank is there.",
    "I6": "Live versions are v, or v and v+1.",
    "I7": "No version that anyone finished, dead or alive or cut off, is undone, unless I15 lets it.",
    "I8": "Copies go where nothing is, and only there.",
    "I9": "A decision rests on reports of its own generation, from all ranks, which are paused.",
    "I10": "Generations only grow; a rank has one process, and gets another once that one is known dead or fenced.",
    "I11": "Engines are shown a version only when every rank holds it, and never an older one.",
    "I12": "A job that ends well ends as one that nothing disturbed, and its report says what happened.",
    "I13": "No rank continues with a state that is half written.",
    "I14": "Nothing is started on a host that is lost, and nothing copied from what lives on there.",
    "I15": "Below replicas: only if they cannot help, to the newest version that all can reach, of one history.",
    "I16": "The ranks of the start are on the job's nodes: a spare holds none until a rank is lost.",
    "I17": "No step is repeated because a host is drained; it is given back once no rank is left on it.",
    "I18": "No more hosts are ordered than are wanted, each order has a name of its own, and after one that brought no "
    "host of use the next one waits.",
    "I19": "Nothing is started on a host whose order is over, and no order outlives the job.",
    "I20": "A job that may have ended with other bits says so; one that ended as if undisturbed does not.",
    "I21": "Once a rank has been surprised, no rank that hears of it has its barrier before a write again.",
    "L1": "A job ends well, or with a reason that its faults excuse.",
    "L2": "Nothing waits forever.",
    "L3": "Nothing healthy is killed, and nothing is recovered without a cause.",
}
