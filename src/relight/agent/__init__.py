"""Supervises the processes of one node and reports facts. Decides nothing; no torch."""
