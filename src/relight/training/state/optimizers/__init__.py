"""Optimizers: their parameter groups, their state as it is copied to another rank, and gradients."""
