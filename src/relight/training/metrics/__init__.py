"""Numbers that a step reports, and the loggers that get each of them once."""
