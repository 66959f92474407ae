"""Looks for violations: every order of events, random schedules, and making what is found smaller."""
