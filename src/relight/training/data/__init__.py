"""Batches: the same ones again for a repeated step, and for a replacement."""
