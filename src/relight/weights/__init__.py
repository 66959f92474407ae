"""Weights from the command line: plan an update, publish a checkpoint, relay to another host."""
