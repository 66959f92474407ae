"""Shows a run from the files in its directory: status, top, events, spans. Changes nothing; no torch."""
