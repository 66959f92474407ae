"""A driver of Ray as users write one: ADDRESS RUN_DIR NUM_CPUS PLACEMENT_SECONDS SCRIPT ARGUMENTS..."""

import sys

import ray

from relight.integrations.ray import RunFailed, run

address, run_dir, num_cpus, seconds, script, *arguments = sys.argv[1:]
if address != "none":
    ray.init(address=address)
try:
    result = run(
        *(script, *arguments),
        nodes=3,
        spare_nodes=1,
        num_cpus=float(num_cpus),
        run_dir=run_dir,
        flags=("--oversubscribe", "--preload", "torch", "--agent-timeout-seconds", "4"),
        placement_seconds=float(seconds),
    )
    print("finished with status", result.status, "in", result.run_dir, flush=True)
except RunFailed as failure:
    print("RunFailed", failure.result.status, failure, flush=True)
    raise SystemExit(3) from None
