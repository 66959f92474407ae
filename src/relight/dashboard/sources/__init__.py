"""Reads on this host: files that grow, logs, memory, stacks."""
