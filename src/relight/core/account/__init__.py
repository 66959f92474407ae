"""Keeps the account of a job for its report: failures, recoveries, doubts, verdict. Takes no decisions."""
