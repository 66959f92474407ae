"""Pretends: the production core in virtual time, among simulated workers and a hostile network."""
