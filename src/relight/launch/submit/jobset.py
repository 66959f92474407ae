"""`relight submit k8s`: a job for Kubernetes as a JobSet, in which each node is a Job of one pod."""

import argparse
import json
import re
import shlex
import subprocess
from typing import Any

from relight.errors import UsageError
from relight.launch.submit.arguments import flags_and_script
from relight.launch.submit.trainjob import RUNTIME, train_job

PORT = 29400  # of the controller
MAX_NODES = 1025  # 1024 in a group of which single Jobs are made again, says JobSet, and the head
FAULT_STATUS = 75  # of a node whose hardware has reported a fault: its Job fails, and is made again
SECRETS = "/etc/relight"
USER = 1000  # of the pods; must be able to write where the script does
UNREACHABLE_SECONDS = 30  # from the moment at which Kubernetes misses a node until its pods are given up
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_OBJECT_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")  # of what exists already
_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-global-index']"
_UID = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"  # so a JobSet of the same name is another run

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


def add_manager(managers: "argparse._SubParsersAction[Any]", run: argparse.ArgumentParser) -> None:
    """Add `relight submit k8s`. `run`: the parser of `relight run`."""
    k8s = managers.add_parser(
        "k8s",
        help="a JobSet for Kubernetes",
        usage="relight submit k8s --nodes M --image IMAGE [--spare-nodes K] [options] -- [flags of relight run] "
        "SCRIPT ...",
        description="Print the manifest of a job for Kubernetes as JSON, or hand it to kubectl with --apply. It is a "
        "JobSet (0.12 or newer, with its feature gate RestartJob) with a Job of one pod for each node. A pod that is "
        "lost is made again, and joins the job as a spare; the others train on. With --claim the job's controller "
        "moves to another pod when its own is lost, by a Lease and a service account that may use it. Without, all "
        "pods are made again then.",
        epilog="example: relight submit k8s --nodes 4 --spare-nodes 1 --image registry/train:1 --gpus 8 "
        "-- --nproc-per-node 8 train.py --lr 0.1 | kubectl apply -f -",
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
    add(
        "--exclude-nodes",
        default="",
        metavar="NAME,...",
        help="nodes of Kubernetes on which no pod is put, such as those that `relight status` says to avoid",
    )
    add("--fixed-controller", action="store_true", help="do not let the controller move: no Lease, no service account")
    add("--grace-seconds", type=int, default=120, metavar="SECONDS", help="time to leave a pod in order; default 120")
    add("--max-restarts", type=int, default=100, metavar="N", help="how many pods are made again; default 100")
    add("--kind", choices=("jobset", "trainjob"), default="jobset", help="what to write; trainjob is for Kubeflow")
    add(
        "--runtime", default=RUNTIME, metavar="NAME", help=f"of a trainjob, a ClusterTrainingRuntime; default {RUNTIME}"
    )
    add("--apply", action="store_true", help="hand the manifest to `kubectl apply -f -`")
    add("run_arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    k8s.set_defaults(call=_submit, run=run)


def manifest(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all that the job needs: a TrainJob, or a JobSet with what lets its controller move.

    Raises UsageError.
    """
    if arguments.kind == "trainjob":
        _check(arguments)
        return train_job(arguments, _NODE, arguments.parser)
    wanted = job_set(arguments)
    if not _moves(arguments):
        return wanted
    return {"apiVersion": "v1", "kind": "List", "items": [*lease_and_rights(arguments), wanted]}


def job_set(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the JobSet. Raises UsageError."""
    own = ("fault_status", *(("run_dir", "lease") if _moves(arguments) else ()))
    given = flags_and_script(arguments, "relight submit k8s --nodes 4 --image IMAGE -- train.py", own)
    _check(arguments)
    name, spares = arguments.job_name, ("--spare-nodes", str(arguments.spare_nodes))
    fault = ("--fault-status", str(FAULT_STATUS))
    run = shlex.join(["relight", "run", "--nnodes", str(arguments.nodes), *spares, *fault])
    token = shlex.join(["--token-file", f"{SECRETS}/token", *given])
    if _moves(arguments):
        directory = shlex.quote(f"{_claim(arguments)[1].rstrip('/')}/runs/{name}-")
        run += f' --lease {name} --run-dir {directory}"$JOBSET_UID"'
    head = f'{run} --node-rank 0 --rdzv-endpoint "[$POD_IP]:{PORT}" {token}'
    node = f'{run} --node-rank "$NODE_RANK" --rdzv-endpoint {name}-head-0-0.{name}:{PORT} {token}'
    groups = [_group("head", 1, _head(arguments, head))]
    if arguments.nodes > 1:
        groups.append(_group("node", arguments.nodes - 1, _pod(arguments, _NODE.format(command=node))))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(arguments),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            **_policies(arguments),
            "replicatedJobs": groups,
        },
    }


def _moves(arguments: argparse.Namespace) -> bool:
    """Return whether the controller moves when its pod is lost: it needs the journal on storage that all pods see."""
    can = arguments.kind == "jobset" and arguments.nodes > 1
    return can and bool(arguments.claim) and not arguments.fixed_controller


def _metadata(arguments: argparse.Namespace) -> dict[str, str]:
    return {"name": arguments.job_name, **({"namespace": arguments.namespace} if arguments.namespace else {})}


def _policies(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what becomes of the JobSet when Jobs end."""
    if _moves(arguments):  # all pods are alike
        done, rules = ["head", "node"], [("lost", "RestartJob", ["head", "node"])]
    else:  # the first rule that matches: without the head all pods fail, and that is to count once
        done, rules = ["head"], [("lostHead", "RestartJobSet", ["head"]), ("lostNode", "RestartJob", ["node"])]
        rules = rules[: min(arguments.nodes, 2)]
    return {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": done},
        "failurePolicy": {
            "maxRestarts": arguments.max_restarts,
            "rules": [{"name": n, "action": action, "targetReplicatedJobs": jobs} for n, action, jobs in rules],
        },
    }


def lease_and_rights(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the Lease, and a service account that may read and replace this Lease and do nothing else."""
    metadata = _metadata(arguments)
    group, name = "rbac.authorization.k8s.io", arguments.job_name
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [name]}
    account = {"kind": "ServiceAccount", "name": name, "namespace": arguments.namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata, "automountServiceAccountToken": False},
        {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata},
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [{**rule, "verbs": ["get", "update"]}],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [account],
        },
    ]


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.image.strip():
        raise UsageError("--image is empty: name the image, for example registry/train:1")
    if arguments.nodes > MAX_NODES:
        raise UsageError(f"--nodes {arguments.nodes}: JobSet makes single Jobs again among at most {MAX_NODES} nodes")
    if any(letter.isspace() for letter in arguments.image):
        raise UsageError(f"--image {arguments.image!r}: the name of an image has no spaces")
    if arguments.namespace and not re.fullmatch(_LABEL, arguments.namespace):
        raise UsageError(f"--namespace {arguments.namespace}: use a-z, 0-9 and '-', at most 63 of them")
    for name in _excluded(arguments):
        if not _OBJECT_NAME.fullmatch(name):
            raise UsageError(f"--exclude-nodes {arguments.exclude_nodes}: expected names of nodes, with commas")
    for option, name in {"secret": arguments.secret, "claim": _claim(arguments)[0]}.items():
        if not _OBJECT_NAME.fullmatch(name) and (name or option == "secret"):
            raise UsageError(f"--{option} {name}: use a-z, 0-9, '-' and '.', and a letter or digit first and last")
    if arguments.claim and not all(_claim(arguments)):
        raise UsageError(f"--claim {arguments.claim}: expected NAME:PATH, for example runs:/runs")
    if _moves(arguments) and not arguments.namespace:
        raise UsageError(
            "--namespace: name it, since the right to the controller's Lease is given to a service account of a "
            "namespace; or --fixed-controller"
        )
    if arguments.kind == "jobset" and arguments.runtime != RUNTIME:
        raise UsageError(f"--runtime {arguments.runtime}: only a job of --kind trainjob has one")
    if not _NAME.fullmatch(arguments.job_name):
        raise UsageError(f"--job-name {arguments.job_name}: use a-z, 0-9 and '-', at most 40 of them, a letter first")
    if min(arguments.gpus, arguments.grace_seconds, arguments.max_restarts) < 0:
        raise UsageError("--gpus, --grace-seconds and --max-restarts cannot be negative")


def _excluded(arguments: argparse.Namespace) -> list[str]:
    return [name.strip() for name in arguments.exclude_nodes.split(",")] if arguments.exclude_nodes else []


def _claim(arguments: argparse.Namespace) -> tuple[str, str]:
    name, _, path = arguments.claim.partition(":")
    return name, path if path.startswith("/") else ""


def _head(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    if _moves(arguments):
        return _pod(arguments, _NODE.format(command=command))
    return _pod(arguments, f"exec {command}", {"tcpSocket": {"port": PORT}, "periodSeconds": 10})


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
    moves = _moves(arguments)
    fields = {"NODE_RANK": _INDEX, "POD_IP": "status.podIP", "RELIGHT_MACHINE": "spec.nodeName"}
    fields |= {"RELIGHT_HOST_ADDRESS": "status.podIP", "JOBSET_UID": _UID} if moves else {}
    container = {
        "name": "relight",
        "image": arguments.image,
        "command": ["/bin/sh", "-c", command],
        "env": [_from(name, path) for name, path in fields.items()],
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
        "automountServiceAccountToken": moves,  # else the pods ask nothing of Kubernetes
        **({"serviceAccountName": arguments.job_name} if moves else {}),
        "terminationGracePeriodSeconds": arguments.grace_seconds,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "tolerations": lost,
        **({"affinity": _elsewhere(excluded)} if (excluded := _excluded(arguments)) else {}),
        "containers": [container],
        "volumes": volumes,
    }
    return {"spec": spec}


def _elsewhere(nodes: list[str]) -> dict[str, Any]:
    """Return the affinity of pods that may be put on any node but these. Each of the conditions takes one name."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    required = {"nodeSelectorTerms": [{"matchFields": fields}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _from(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _submit(arguments: argparse.Namespace) -> int:
    text = json.dumps(manifest(arguments), indent=2)
    if not arguments.apply:
        print(text)
        return 0
    try:
        return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=False).returncode
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"kubectl cannot be run: {reason}; without --apply the manifest is printed") from error
