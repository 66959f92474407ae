"""Decides: events and the time in, commands out. No input or output, no clock, no randomness."""
