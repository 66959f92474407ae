"""`relight submit k8s`: a job for Kubernetes as a JobSet, in which each node is a Job of one pod."""

import argparse
import json
import re
import shlex
import subprocess
from typing import Any

from relight.errors import UsageError
from relight.launch.submitted import flags_and_script

PORT = 29400  # of the controller
SECRETS = "/etc/relight"
USER = 1000  # of the pods; must be able to write where the script does
UNREACHABLE_SECONDS = 30  # from the moment at which Kubernetes misses a node until its pods are given up
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # of what exists already
_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-global-index']"

# A pod that is evicted or deleted gets SIGTERM: its ranks move to spares, and `relight run` ends with 0. Status 0
# would say that the node's Job is done, so that no pod is made in its place. A `wait` that the signal ends returns 143
# also if the job has ended meanwhile; the next one returns the job's status, or 127 if it was returned before.
_NODE = """\
told= job=
trap 'told=yes; [ -z "$job" ] || kill -TERM "$job"' TERM
{command} &
job=$!
[ -z "$told" ] || kill -TERM "$job"
wait "$job"; status=$?
while kill -0 "$job" 2>/dev/null; do wait "$job"; status=$?; done
if [ "$status" -eq 143 ]; then wait "$job"; last=$?; [ "$last" -eq 127 ] || status=$last; fi
[ -z "$told" ] || [ "$status" -ne 0 ] || status=143
exit "$status"
"""


def add_manager(managers: "argparse._SubParsersAction[Any]") -> None:
    """Add `relight submit k8s`."""
    k8s = managers.add_parser(
        "k8s",
        help="a JobSet for Kubernetes",
        usage="relight submit k8s --nodes M --image IMAGE [--spare-nodes K] [options] -- [flags of relight run] "
        "SCRIPT ...",
        description="Print the manifest of a job for Kubernetes as JSON, or hand it to kubectl with --apply. It is a "
        "JobSet (0.12 or newer, with its feature gate RestartJob) with a Job of one pod for each node. A pod that is "
        "lost is made again, and joins the job as a spare; the others train on. If the first pod is lost, all are made "
        "again, and go on from the newest checkpoint, which needs training.checkpoint(...) and --claim.",
        epilog="example: relight submit k8s --nodes 4 --spare-nodes 1 --image registry/train:1 --gpus 8 "
        "-- --nproc-per-node 8 train.py --lr 0.1 | kubectl apply -f -",
        allow_abbrev=False,
    )
    add = k8s.add_argument
    add("--nodes", type=int, required=True, metavar="M", help="number of nodes, spares included")
    add("--image", required=True, metavar="IMAGE", help="image with relight, torch and the script")
    add("--spare-nodes", type=int, default=0, metavar="K", help="the last K of the nodes are spares")
    add("--job-name", default="relight", metavar="NAME", help="name of the JobSet; default relight")
    add("--namespace", default="", metavar="NAME", help="namespace of the JobSet; default: that of kubectl")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of each pod, as nvidia.com/gpu; default 0")
    add("--secret", default="relight-token", metavar="NAME", help="Secret with the key token; default relight-token")
    add("--claim", default="", metavar="NAME:PATH", help="a PersistentVolumeClaim, and where all pods see it")
    add("--grace-seconds", type=int, default=120, metavar="SECONDS", help="time to leave a pod in order; default 120")
    add("--max-restarts", type=int, default=100, metavar="N", help="how many pods are made again; default 100")
    add("--apply", action="store_true", help="hand the manifest to `kubectl apply -f -`")
    add("run_arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    k8s.set_defaults(call=_submit)


def job_set(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the manifest. Raises UsageError."""
    given = flags_and_script(arguments, "relight submit k8s --nodes 4 --image IMAGE -- train.py")
    _check(arguments)
    name, spares = arguments.job_name, ("--spare-nodes", str(arguments.spare_nodes))
    run = shlex.join(["relight", "run", "--nnodes", str(arguments.nodes), *spares])
    token = shlex.join(["--token-file", f"{SECRETS}/token", *given])
    head = f'exec {run} --node-rank 0 --rdzv-endpoint "[$POD_IP]:{PORT}" {token}'
    node = f'{run} --node-rank "$NODE_RANK" --rdzv-endpoint {name}-head-0-0.{name}:{PORT} {token}'
    groups = [_group("head", 1, _pod(arguments, head, {"tcpSocket": {"port": PORT}, "periodSeconds": 10}))]
    if arguments.nodes > 1:
        groups.append(_group("node", arguments.nodes - 1, _pod(arguments, _NODE.format(command=node))))
    metadata = {"name": name, **({"namespace": arguments.namespace} if arguments.namespace else {})}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
            "failurePolicy": {
                "maxRestarts": arguments.max_restarts,
                "rules": [  # the first that matches: without the head all pods fail, and that is to count once
                    {"name": "lostHead", "action": "RestartJobSet", "targetReplicatedJobs": ["head"]},
                    {"name": "lostNode", "action": "RestartJob", "targetReplicatedJobs": ["node"]},
                ][: len(groups)],
            },
            "replicatedJobs": groups,
        },
    }


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.image.strip():
        raise UsageError("--image is empty: name the image, for example registry/train:1")
    names = {"namespace": arguments.namespace, "secret": arguments.secret, "claim": _claim(arguments)[0]}
    for option, name in names.items():
        if name and not _OBJECT_NAME.fullmatch(name):
            raise UsageError(f"--{option} {name}: use a-z, 0-9, '-' and '.', and a letter or digit first and last")
    if not _NAME.fullmatch(arguments.job_name):
        raise UsageError(f"--job-name {arguments.job_name}: use a-z, 0-9 and '-', at most 40 of them, a letter first")
    if arguments.claim and not all(_claim(arguments)):
        raise UsageError(f"--claim {arguments.claim}: expected NAME:PATH, for example runs:/runs")
    if min(arguments.gpus, arguments.grace_seconds, arguments.max_restarts) < 0:
        raise UsageError("--gpus, --grace-seconds and --max-restarts cannot be negative")


def _claim(arguments: argparse.Namespace) -> tuple[str, str]:
    name, _, path = arguments.claim.partition(":")
    return name, path if path.startswith("/") else ""


def _group(name: str, replicas: int, pod: dict[str, Any]) -> dict[str, Any]:
    """Return Jobs of one pod each. A Job fails with its pod, and the JobSet makes it again."""
    job = {"backoffLimit": 0, "completions": 1, "parallelism": 1, "completionMode": "Indexed", "template": pod}
    return {"name": name, "replicas": replicas, "template": {"spec": job}}


def _pod(arguments: argparse.Namespace, command: str, readiness: dict[str, Any] | None = None) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        # root owns these files, and lends them to the pod's group: relight accepts that
        {"name": "token", "secret": {"secretName": arguments.secret, "defaultMode": 0o440}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [
        {"name": "token", "mountPath": SECRETS, "readOnly": True},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    where = {}
    if arguments.claim:
        claim, path = _claim(arguments)
        volumes.append({"name": "claim", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "claim", "mountPath": path})
        where = {"workingDir": path}
    container = {
        "name": "relight",
        "image": arguments.image,
        "command": ["/bin/sh", "-c", command],
        "env": [_from("NODE_RANK", _INDEX), _from("POD_IP", "status.podIP"), _from("RELIGHT_MACHINE", "spec.nodeName")],
        "ports": [{"name": "controller", "containerPort": PORT}] if readiness else [],
        "resources": {"limits": {"nvidia.com/gpu": arguments.gpus}} if arguments.gpus else {},
        "volumeMounts": mounts,
        **where,
        **({"readinessProbe": readiness} if readiness else {}),
    }
    lost = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": UNREACHABLE_SECONDS,
        }
        for state in ("not-ready", "unreachable")
    ]
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,  # the pods ask nothing of Kubernetes
        "terminationGracePeriodSeconds": arguments.grace_seconds,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "tolerations": lost,
        "containers": [container],
        "volumes": volumes,
    }
    return {"spec": spec}


def _from(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _submit(arguments: argparse.Namespace) -> int:
    text = json.dumps(job_set(arguments), indent=2)
    if not arguments.apply:
        print(text)
        return 0
    try:
        return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=False).returncode
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"kubectl cannot be run: {reason}; without --apply the manifest is printed") from error
