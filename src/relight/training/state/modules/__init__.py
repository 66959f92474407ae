"""Modules: how they are built, and what a step changes in them besides parameters."""
