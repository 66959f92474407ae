"""Draws a timeline: in the terminal, as SVG or PNG, and as a trace for Perfetto."""
