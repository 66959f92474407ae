"""One step as every rank takes it: its phases, its writes, and the barrier between them."""
