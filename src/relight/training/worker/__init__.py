"""The loop of one process: steps are offered, committed, or undone and offered again; and the parts that it needs."""
