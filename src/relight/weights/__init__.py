"""The commands about weights: plan an update, publish a checkpoint, relay to another host."""
