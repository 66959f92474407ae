"""`relight submit k8s`: the JobSet, as its published schema, the shell and `relight run` read it."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relight.cli import main, make_parser
from relight.errors import UsageError
from relight.launch.submit.jobset import _NODE
from relight.launch.submit.jobset import manifest as printed
from tests.clusters.quick_start import quick_start

RUN = ("--nproc-per-node", "2", "my train.py", "--lr", "0.1")
LAST = ("--nodes", "4", "--spare-nodes", "1", "--image", "registry/train:1")


def manifest(*options: str, run: tuple[str, ...] = RUN) -> dict[str, Any]:
    return printed(make_parser().parse_args(["submit", "k8s", *options, "--", *run]))


def pod(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = group["template"]["spec"]["template"]["spec"]
    return found


def test_only_the_pod_that_failed_is_made_again_unless_it_is_the_head() -> None:
    spec = manifest(*LAST)["spec"]
    assert [(group["name"], group["replicas"]) for group in spec["replicatedJobs"]] == [("head", 1), ("node", 3)]
    assert [(rule["action"], rule["targetReplicatedJobs"]) for rule in spec["failurePolicy"]["rules"]] == [
        ("RestartJobSet", ["head"]),  # first: if the head is lost all fail, and that counts once
        ("RestartJob", ["node"]),
    ]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["head"]}
    for group in spec["replicatedJobs"]:
        assert group["template"]["spec"]["backoffLimit"] == 0
        assert pod(group)["restartPolicy"] == "Never"
        assert not pod(group)["automountServiceAccountToken"]
        assert pod(group)["securityContext"]["fsGroup"]
        assert pod(group)["volumes"][0]["secret"]["defaultMode"] == 0o440


def test_a_job_of_one_node_names_no_group_that_it_lacks() -> None:
    spec = manifest("--nodes", "1", "--image", "i")["spec"]
    assert [rule["targetReplicatedJobs"] for rule in spec["failurePolicy"]["rules"]] == [["head"]]


def test_the_lines_are_ones_for_relight_run() -> None:
    head, node = (pod(group)["containers"][0]["command"] for group in manifest(*LAST)["spec"]["replicatedJobs"])
    lines = (head[2].removeprefix("exec "), next(line for line in node[2].splitlines() if line.startswith("relight")))
    ranks = []
    for line in lines:
        words = shlex.split(line.replace("$NODE_RANK", "3").removesuffix("&"))
        arguments = make_parser().parse_args(words[1:])
        assert arguments.script_and_arguments == ["my train.py", "--lr", "0.1"]
        assert (arguments.nnodes, arguments.spare_nodes, arguments.token_file) == ("4", 1, "/etc/relight/token")
        ranks.append((arguments.node_rank, arguments.rdzv_endpoint))
    assert ranks == [(0, "[$POD_IP]:29400"), (3, "relight-head-0-0.relight:29400")]


MOVES = (*LAST, "--namespace", "ml", "--claim", "runs:/runs")


def test_a_controller_that_can_move_makes_all_pods_alike() -> None:
    *rights, job_set = manifest(*MOVES)["items"]
    spec = job_set["spec"]
    assert [rule["targetReplicatedJobs"] for rule in spec["failurePolicy"]["rules"]] == [["head", "node"]]
    assert spec["failurePolicy"]["rules"][0]["action"] == "RestartJob"
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["head", "node"]  # the head may be drained, and be done
    for group in spec["replicatedJobs"]:
        (container,) = pod(group)["containers"]
        line = next(line for line in container["command"][2].splitlines() if line.startswith("relight"))
        arguments = make_parser().parse_args(shlex.split(line.replace("$NODE_RANK", "1").removesuffix("&"))[1:])
        assert (arguments.lease, arguments.run_dir) == ("relight", "/runs/runs/relight-$JOBSET_UID")
        assert pod(group)["serviceAccountName"] == "relight"
        assert {"JOBSET_UID", "RELIGHT_HOST_ADDRESS"} <= {variable["name"] for variable in container["env"]}
    assert [item["kind"] for item in rights] == ["ServiceAccount", "Lease", "Role", "RoleBinding"]
    assert {item["metadata"]["namespace"] for item in rights} == {"ml"}


def test_the_pods_may_read_and_replace_their_lease_and_nothing_else() -> None:
    _, _, role, binding = manifest(*MOVES)["items"][:4]
    assert role["rules"] == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["relight"],
            "verbs": ["get", "update"],
        }
    ]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "relight", "namespace": "ml"}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_a_controller_that_cannot_move_asks_for_no_rights() -> None:
    for options in ((*MOVES, "--fixed-controller"), LAST):
        found = manifest(*options)
        assert found["kind"] == "JobSet"
        assert "lease" not in json.dumps(found)
        assert "serviceAccountName" not in json.dumps(found)


def test_a_train_job_leaves_the_pods_to_its_runtime() -> None:
    found = manifest(*LAST, "--kind", "trainjob", "--runtime", "mine", "--gpus", "8")
    assert (found["kind"], found["spec"]["runtimeRef"]) == ("TrainJob", {"name": "mine"})
    trainer = found["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["image"]) == (4, "registry/train:1")
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert trainer["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "relight-token", "key": "token"}}
    line = next(line for line in trainer["command"][2].splitlines() if line.startswith("relight"))
    arguments = make_parser().parse_args(shlex.split(line.removesuffix("&"))[1:])
    assert (arguments.nnodes, arguments.spare_nodes, arguments.nproc_per_node) == ("auto", 1, "2")
    with pytest.raises(UsageError, match="--claim is for --kind jobset"):
        manifest(*LAST, "--kind", "trainjob", "--claim", "runs:/runs")


def test_the_token_of_a_train_job_is_written_for_its_user_alone(tmp_path: Path) -> None:
    command = manifest(*LAST, "--kind", "trainjob")["spec"]["trainer"]["command"]
    first = command[2].splitlines()[0].replace("/tmp/relight-token", str(tmp_path / "token"))
    look = f'{first}; echo "left: $JOB_TOKEN"'
    environment = {"JOB_TOKEN": "the secret", "PATH": "/usr/bin:/bin"}
    said = subprocess.run(["/bin/sh", "-c", look], env=environment, check=True, capture_output=True, text=True).stdout
    assert said == "left: \n"
    assert (tmp_path / "token").read_text() == "the secret"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_options_have_their_places_in_the_pods() -> None:
    (head,) = manifest(
        *("--nodes", "1", "--image", "i", "--gpus", "8", "--claim", "runs:/runs", "--grace-seconds", "30")
    )["spec"]["replicatedJobs"]
    (container,) = pod(head)["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["workingDir"] == "/runs"
    assert pod(head)["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert pod(head)["terminationGracePeriodSeconds"] == 30


JOB = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
if sys.argv[2] == "waits":
    signal.sigwait([signal.SIGTERM])
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("ends_with", "told", "status"),
    [(0, True, 143), (3, True, 3), (0, False, 0)],  # 143: left in order, and the Job must not count as done
)
def test_a_node_that_was_told_to_leave_is_not_done(tmp_path: Path, ends_with: int, told: bool, status: int) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = shlex.join([sys.executable, str(job), str(ends_with), "waits" if told else "ends"])
    with subprocess.Popen(["/bin/sh", "-c", _NODE.format(command=command)], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"ready\n"
        if told:
            shell.send_signal(signal.SIGTERM)
        assert shell.wait(30.0) == status


def test_no_pod_is_put_on_a_node_that_is_excluded() -> None:
    """Kubernetes takes one name in each condition on the name of a node, and all of one term must hold."""
    for group in manifest(*LAST, "--exclude-nodes", "n3,rack-7.local")["spec"]["replicatedJobs"]:
        required = pod(group)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]
        assert term["matchFields"] == [
            {"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("n3", "rack-7.local")
        ]
    assert "affinity" not in pod(manifest(*LAST)["spec"]["replicatedJobs"][0])


def test_the_quick_start(tmp_path: Path) -> None:
    """The line of the documentation, as it stands there. Without Docker and a control plane the others cannot run."""
    typed = quick_start("Kubernetes", "sh", {"relight submit": f"{shlex.quote(sys.executable)} -m relight submit"})
    (line,) = [line for line in typed.replace("\\\n", "").splitlines() if line.endswith("> job.json")]
    subprocess.run(["sh", "-ec", line], cwd=tmp_path, check=True)
    *_, job_set = json.loads((tmp_path / "job.json").read_text())["items"]
    head, nodes = job_set["spec"]["replicatedJobs"]
    assert (head["replicas"], nodes["replicas"]) == (1, 3)
    (container,) = pod(head)["containers"]
    assert f"docker push {container['image']}\n" in typed
    assert f"create secret generic {pod(head)['volumes'][0]['secret']['secretName']} " in typed
    assert "kubectl apply -f job.json" in typed


@pytest.mark.parametrize(
    ("options", "run", "says"),
    [
        (LAST, (), "no script given"),
        (("--nodes", "2", "--spare-nodes", "2", "--image", "i"), RUN, "one must hold the ranks"),
        ((*LAST, "--job-name", "My_job"), RUN, "--job-name My_job"),
        ((*LAST, "--claim", "runs"), RUN, "expected NAME:PATH"),
        ((*LAST, "--gpus", "-1"), RUN, "cannot be negative"),
        (("--nodes", "1026", "--image", "i"), RUN, "at most 1025 nodes"),
        (("--nodes", "2", "--image", ""), RUN, "--image is empty"),
        (("--nodes", "2", "--image", "registry/my train"), RUN, "has no spaces"),
        ((*LAST, "--namespace", "my space"), RUN, "--namespace my space"),
        ((*LAST, "--namespace", "my.space"), RUN, "--namespace my.space"),
        ((*LAST, "--secret", "a..b"), RUN, "--secret a..b"),
        ((*LAST, "--secret", ""), RUN, "--secret :"),
        ((*LAST, "--claim", "runs:/runs"), RUN, "--namespace: name it"),
        (MOVES, ("--run-dir", "/elsewhere", "train.py"), "--run-dir after `--`: the job that is submitted"),
        (LAST, ("--fault-status", "3", "train.py"), "--fault-status after `--`"),
        (LAST, ("--nnodes=3", "train.py"), "--nnodes after `--`"),
        (LAST, ("--nproc-per-nod", "3", "train.py"), "did you mean --nproc-per-node"),
        (LAST, ("--nproc-per-node", "3"), "no script given"),
        (LAST, ("--nproc-per-node", "x", "train.py"), "--nproc-per-node x: expected a number above 0"),
        (("--nodes", "0", "--image", "i"), RUN, "--nodes 0: a job has at least one"),
        ((*LAST, "--runtime", "mine"), RUN, "--runtime mine: only a job of --kind trainjob"),
        ((*LAST, "--secret", "Token"), RUN, "--secret Token"),
        ((*LAST, "--claim", "Runs:/runs"), RUN, "--claim Runs"),
    ],
)
def test_what_makes_no_sense_is_refused(options: tuple[str, ...], run: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        manifest(*options, run=run)


def test_without_kubectl_the_manifest_can_still_be_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "k8s", *LAST, "--apply", "--", *RUN]) == 2
    assert "without --apply the manifest is printed" in capsys.readouterr().err
    assert main(["submit", "k8s", *LAST, "--", *RUN]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "JobSet"


def test_what_the_api_server_refuses_is_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        "#!/bin/sh\n/bin/cat > /dev/null\necho 'Error: jobsets is forbidden: exceeded quota' >&2\nexit 1\n"
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "k8s", *LAST, "--apply", "--", *RUN]) == 1
    assert "exceeded quota" in capfd.readouterr().err
