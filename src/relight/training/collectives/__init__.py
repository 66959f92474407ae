"""Process groups whose collectives end at once when a peer fails, and the all-reduce of the barrier."""
