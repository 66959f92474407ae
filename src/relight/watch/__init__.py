"""Tells of a run from the files in its directory: status, top, events, spans. Touches nothing; no torch."""
