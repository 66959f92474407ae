"""Tensors at both ends: where they are read from, staged, and put."""
