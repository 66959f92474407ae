"""The part of a command line that all managers of `relight submit` read alike.

A job may wait for hours in a queue. So its flags are read when it is submitted, as `relight run` will read them.
"""

import argparse
from collections.abc import Iterable

from relight.errors import UsageError
from relight.flags import read_settings, unknown_hint

# Settings of `relight run` that every manager gives to the nodes by itself.
OF_ALL = ("nnodes", "node_rank", "rdzv_endpoint", "spare_nodes", "token_file", "standalone")
_WORKERS = ("auto", "cpu", "gpu")  # instead of a number


def flags_and_script(arguments: argparse.Namespace, example: str, own: Iterable[str] = ()) -> list[str]:
    """Return the flags of `relight run`, the script and its arguments.

    `own`: further settings that the job gets from its manager. Raises UsageError, also for a number of nodes that makes
    no sense.
    """
    if arguments.nodes < 1:
        raise UsageError(f"--nodes {arguments.nodes}: a job has at least one")
    if not 0 <= arguments.spare_nodes < arguments.nodes:
        raise UsageError(f"--spare-nodes {arguments.spare_nodes} of {arguments.nodes} nodes: one must hold the ranks")
    given = list(arguments.run_arguments)
    given = given[1:] if given[:1] == ["--"] else given
    run: argparse.ArgumentParser = arguments.run
    parsed, unknown = run.parse_known_args(given)
    if unknown:
        raise UsageError(unknown_hint(unknown[0], "run", run))
    if not parsed.script_and_arguments:
        raise UsageError(f"no script given; for example: {example}")
    read_settings(parsed)  # a value out of bounds
    workers = parsed.nproc_per_node or "1"
    if workers not in _WORKERS and not (workers.isdecimal() and int(workers)):
        raise UsageError(f"--nproc-per-node {workers}: expected a number above 0, or {', '.join(_WORKERS)}")
    for setting in (*OF_ALL, *own):
        if getattr(parsed, setting) != run.get_default(setting):
            flag = setting.replace("_", "-")
            raise UsageError(f"--{flag} after `--`: the job that is submitted has its own; leave it out")
    return given
