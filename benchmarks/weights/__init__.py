"""Moving weights: publishing to engines, restoring a replacement, and what others do instead."""
