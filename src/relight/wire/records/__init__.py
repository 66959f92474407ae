"""Files in which workers of `relight prove` and `relight doctor` leave records for these commands."""
