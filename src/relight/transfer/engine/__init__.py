"""Receives updates inside an inference process, and says which version it answers with."""
