"""Bits of steps, digested and compared: by `relight prove`, and where a step is computed twice."""
