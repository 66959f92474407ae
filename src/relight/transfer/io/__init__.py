"""Channels between processes: messages, byte streams, shared buffers, and tensors as bytes."""
