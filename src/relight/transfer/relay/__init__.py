"""Carries updates between hosts: one copy for all engines of a host, and sources on other hosts."""
