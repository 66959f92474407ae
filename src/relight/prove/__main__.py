"""One attempt of a proof, as a process of its own: `python -m relight.prove SETTINGS`, the job's settings as JSON."""

import os
import sys
from pathlib import Path

from relight.launch.commands import launch
from relight.parent import end_with_parent
from relight.wire.settings import decode_settings


def main() -> int:
    """Run the job to its end; returns its exit status."""
    end_with_parent(os.getppid())
    return launch(decode_settings(Path(sys.argv[1]).read_bytes()), quiet=True)


if __name__ == "__main__":
    sys.exit(main())
