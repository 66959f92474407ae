"""Readings of a process without its help: its page in shared memory, and files of the kernel."""
