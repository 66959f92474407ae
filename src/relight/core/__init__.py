"""Decides: events and the time in, commands out. No input or output, no clock, no randomness.

Two machines, `controller` (its parts in `stages` and `job`) and `worker`, speak `protocol`; `recovery`, `detection` and
`membership` are rules and values below them, and `account` keeps what a report shows.
"""
