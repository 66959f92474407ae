"""`relight submit k8s --kind trainjob`: a job for Kubeflow's Trainer, whose runtime says what the pods are.

The Trainer sets torchrun's variables, which `relight run --nnodes auto` reads. A manifest may add variables to the pods
of every version of the Trainer, but volumes only in a way that each version has of its own: so the token comes in a
variable, and the shell writes it to a file.
"""

import argparse
import shlex
from typing import Any

from relight.errors import UsageError
from relight.launch.submit.arguments import flags_and_script

RUNTIME = "torch-distributed"
_TOKEN = "/tmp/relight-token"
_WRITE = f'(umask 077; printf %s "$JOB_TOKEN" > {_TOKEN}); unset JOB_TOKEN\n'
_OF_THE_RUNTIME = ("claim", "grace_seconds", "max_restarts", "fixed_controller", "exclude_nodes")


def train_job(arguments: argparse.Namespace, node: str, defaults: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the manifest; `node` is the command that each pod runs, until the job or the pod ends.

    Raises UsageError, also for an option whose place is in the runtime.
    """
    given = flags_and_script(arguments, "relight submit k8s --kind trainjob --nodes 4 --image IMAGE -- train.py")
    for option in _OF_THE_RUNTIME:
        if getattr(arguments, option) != defaults.get_default(option):
            flag = option.replace("_", "-")
            raise UsageError(f"--{flag} is for --kind jobset; here the Trainer's runtime describes the pods")
    spares = ("--spare-nodes", str(arguments.spare_nodes))
    run = shlex.join(["relight", "run", "--nnodes", "auto", *spares, "--token-file", _TOKEN, *given])
    token = {"secretKeyRef": {"name": arguments.secret, "key": "token"}}
    machine = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    gpus = {"nvidia.com/gpu": arguments.gpus}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "name": arguments.job_name,
            **({"namespace": arguments.namespace} if arguments.namespace else {}),
        },
        "spec": {
            "runtimeRef": {"name": arguments.runtime},
            "trainer": {
                "image": arguments.image,
                "numNodes": arguments.nodes,
                "command": ["/bin/sh", "-c", _WRITE + node.format(command=run)],
                "env": [
                    {"name": "JOB_TOKEN", "valueFrom": token},
                    {"name": "RELIGHT_MACHINE", "valueFrom": machine},
                ],
                **({"resourcesPerNode": {"limits": gpus}} if arguments.gpus else {}),
            },
        },
    }
