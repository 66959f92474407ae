"""Adapters for inference engines of others. Each is imported only by the engine that it is for."""
