"""Decides what a recovery restores: forward or back, from which ranks, or from which fallback tier. Pure functions."""
