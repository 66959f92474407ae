"""The files of a run directory: its journal, its trace, and who owns it."""
