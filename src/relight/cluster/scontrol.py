"""Lists of hosts that only Slurm itself can expand, by its own command."""

import subprocess

from relight.cluster.node_list import expand

PATIENCE_SECONDS = 10.0
MAX_WORDS = 300  # characters of Slurm's own words


def expand_list(text: str) -> tuple[str, ...]:
    """Return the hosts of Slurm's list, with `scontrol` if its form is not known here. Raises ValueError."""
    try:
        return expand(text)
    except ValueError as error:
        command = ("scontrol", "show", "hostnames", text)
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
        except FileNotFoundError:
            raise ValueError(f"{error}, and there is no scontrol on the PATH") from None
        except (OSError, subprocess.SubprocessError) as failure:
            said = " ".join((getattr(failure, "stderr", "") or str(failure)).split())[:MAX_WORDS]
            raise ValueError(f"{error}, and scontrol: {said}") from None
        if not (hosts := tuple(found.stdout.split())):
            raise ValueError(f"{error}, and scontrol names no host") from None
        return hosts
