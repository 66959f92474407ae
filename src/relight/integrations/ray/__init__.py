"""Jobs on a cluster of Ray: `run` starts `relight` on hosts that a placement group gives, and sees it through.

An actor on each host runs `relight run`. If a host is lost, Ray starts its actor again once the placement group has
another node for it, and that node joins the job as a spare. If the host with the controller is lost, an actor that Ray
restarts wherever there is room carries its successor, which continues from the journal in the run directory. Of two
controllers the older one gives way: see `relight controller --take-over`.
"""

from relight.integrations.ray.jobs import Result, RunFailed, run

__all__ = ["Result", "RunFailed", "run"]
