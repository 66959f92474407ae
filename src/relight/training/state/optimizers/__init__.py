"""Optimizers: their parameter groups, and their state as it is copied to another rank."""
