"""Sends the weights of a version to inference engines while the next step is computed."""
