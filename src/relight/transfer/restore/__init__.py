"""Sends the state of a healthy replica to a replacement."""
