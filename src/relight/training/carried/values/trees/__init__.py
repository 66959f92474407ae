"""Values as trees of plain values and tensors: written down in one process, and made again in another."""
