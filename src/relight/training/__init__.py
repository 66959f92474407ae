"""Trains: the loop of steps, state and digests, process groups. The room where torch is at home."""
