"""The part of a command line that all managers of `relight submit` read alike."""

import argparse

from relight.errors import UsageError


def flags_and_script(arguments: argparse.Namespace, example: str) -> list[str]:
    """Return the flags of `relight run`, the script and its arguments. Raises UsageError, also for too many spares."""
    given = list(arguments.run_arguments)
    given = given[1:] if given[:1] == ["--"] else given
    if not given:
        raise UsageError(f"no script given; for example: {example}")
    if not 0 <= arguments.spare_nodes < arguments.nodes:
        raise UsageError(f"--spare-nodes {arguments.spare_nodes} of {arguments.nodes} nodes: one must hold the ranks")
    return given
