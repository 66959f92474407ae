"""Simulated processes, networks and failures, as values that can be copied and compared."""
