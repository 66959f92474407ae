"""Variants of the rule, the controller, the detector and the worker that must not be; mutations.py lists them."""
