"""A worker's part in a recovery: pause, reach the decided version, resume."""
