"""Versions of the state outside of this process: buddy memory, and checkpoints on a disk."""
