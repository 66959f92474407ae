"""Serves: the controller's loop, journal, status, dashboard. The core decides; no torch."""
