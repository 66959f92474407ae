"""Joins a worker process to its agent: messages, the shared page, the store of a generation."""
