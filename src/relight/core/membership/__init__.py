"""Keeps the processes of a job: their ranks, hosts and standbys, and when the next one is started."""
