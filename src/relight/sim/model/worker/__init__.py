"""A simulated worker: production decisions, carried out in virtual time, step by step and in recoveries."""
