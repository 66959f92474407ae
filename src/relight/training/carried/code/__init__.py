"""A script's code: its source, its loop of steps, and what the names in it refer to."""
