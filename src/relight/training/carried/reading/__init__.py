"""Reads the code of one iteration: which places it reads, which it writes, and what each feeds."""
