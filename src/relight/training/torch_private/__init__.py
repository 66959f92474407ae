"""Every private interface of torch that relight leans on, checked on the releases that `installed.TESTED` names.

Tests of the same names exercise each against the installed version, so that an upgrade that moves one of them fails
there, by name, and not in somebody's recovery.
"""
