"""Simulated hosts, agents and jobs around the production core, in virtual time or in every order of events."""
