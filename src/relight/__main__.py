"""`relight`, and `python -m relight`. Ctrl-C is quiet also while the command is still being imported."""

import sys


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        from relight.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
