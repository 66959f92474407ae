"""Defines the messages of the core: events in, commands out, and the values that both carry."""
