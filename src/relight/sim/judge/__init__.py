"""Tells from a simulated run, or from a journal, whether the rules of the protocol held."""
