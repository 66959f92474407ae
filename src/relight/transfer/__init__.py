"""Moves weights: pure plans and schedules, and the engine that runs them. This file loads no torch."""
