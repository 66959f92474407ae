"""What the dashboard reads on this host: files that grow, logs, memory, stacks."""
