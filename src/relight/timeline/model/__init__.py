"""Holds a timeline as values: what the files of a run say, as spans and windows of time."""
