"""Holds the state of a job that all stages share, and the parts that several stages call."""
