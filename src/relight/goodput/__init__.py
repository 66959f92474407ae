"""Estimates what failures cost a large job, with and without relight: arithmetic, no measurement."""
