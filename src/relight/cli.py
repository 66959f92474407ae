"""The `relight` command: reads arguments, calls the rooms below. No torch, nothing of training."""


def main() -> int:
    """Run the command line; return the exit status."""
    raise NotImplementedError
