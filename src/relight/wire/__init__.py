"""Carries messages: typed, framed, authenticated, bounded. No decisions, no pickle, no torch."""
