"""Judges from agents' samples which process has stopped, and which rank is slow."""
