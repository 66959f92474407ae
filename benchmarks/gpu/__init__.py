"""Everything that must be shown on a machine with GPUs, in parts: `python -m benchmarks.gpu`."""
