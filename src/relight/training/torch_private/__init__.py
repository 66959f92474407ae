"""Every private interface of torch that relight leans on. Checked on torch 2.13.0.

Tests of the same names exercise each against the installed version, so that an upgrade that moves one of them fails
there, by name, and not in somebody's recovery.
"""
