"""`relight submit slurm`: the batch script, as bash and `relight run` read it."""

import shlex
import subprocess

import pytest

from relight.cli import main, make_parser
from relight.errors import UsageError
from relight.launch.submit.slurm import slurm_script

RUN = ("--nproc-per-node", "2", "my train.py", "--lr", "0.1")


def script(*options: str, run: tuple[str, ...] = RUN) -> str:
    return slurm_script(make_parser().parse_args(["submit", "slurm", *options, "--", *run]))


def test_the_script_is_one_for_sbatch() -> None:
    text = script("--nodes", "4", "--spare-nodes", "1", "--time", "1:00", "--option=--partition=gpu")
    options = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert {"--nodes=4", "--no-kill", "--requeue", "--signal=B:USR1@120", "--time=1:00", "--partition=gpu"} <= options
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_line_is_one_for_relight_run() -> None:
    (line,) = [line for line in script("--nodes", "4").splitlines() if " -m relight run " in line]
    words = shlex.split(line.removesuffix("&"))
    arguments = make_parser().parse_args(words[words.index("run") :])
    assert arguments.script_and_arguments == ["my train.py", "--lr", "0.1"]
    assert (arguments.nnodes, arguments.supplier, arguments.run_dir) == ("auto", "slurm", "runs/$SLURM_JOB_ID")
    assert "--supplier" not in script("--nodes", "4", "--no-orders")


@pytest.mark.parametrize(
    ("options", "run", "says"),
    [
        (("--nodes", "2"), (), "no script given"),
        (("--nodes", "2", "--spare-nodes", "2"), RUN, "one must hold the ranks"),
        (("--nodes", "0"), RUN, "--nodes 0: a job has at least one"),
        (("--nodes", "2", "--option=partition"), RUN, "expected an option of sbatch"),
        (("--nodes", "2", "--option=--nodes=5"), RUN, "the script has its own"),
        (("--nodes", "2", "--option=-N5"), RUN, "the script has its own"),
        (("--nodes", "2", "--time", "tomorrow"), RUN, "expected a time limit of Slurm"),
        (("--nodes", "2", "--time", "1:00\nrm"), RUN, "expected a time limit of Slurm"),
        (("--nodes", "2", "--job-name", "a\nb"), RUN, "expected a name of one line"),
        (("--nodes", "2", "--warning-seconds", "0"), RUN, "expected 1 to 65535"),
        (("--nodes", "2"), ("--nproc-per-nod", "2", "train.py"), "did you mean --nproc-per-node"),
        (("--nodes", "2"), ("--nproc-per-node", "2"), "no script given"),
        (("--nodes", "2"), ("--nproc-per-node", "0", "train.py"), "--nproc-per-node 0: expected a number above 0"),
        (("--nodes", "2"), ("--token-file", "t", "train.py"), "--token-file after `--`"),
        (("--nodes", "2"), ("--run-dir", "x", "train.py"), "--run-dir after `--`"),
        (("--nodes", "2"), ("--supplier", "x", "train.py"), "--supplier after `--`"),
        (("--nodes", "2"), ("--agent-timeout-seconds", "-1", "train.py"), "--agent-timeout-seconds"),
    ],
)
def test_what_makes_no_sense_is_refused(options: tuple[str, ...], run: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        script(*options, run=run)


@pytest.mark.parametrize("limit", ["90", "1:30:00", "2-0", "1-12:00", "UNLIMITED"])
def test_time_limits_of_slurm_are_taken(limit: str) -> None:
    assert f"#SBATCH --time={limit}\n" in script("--nodes", "2", "--time", limit)


def test_with_no_orders_of_its_own_a_job_may_have_another_supplier() -> None:
    assert "--supplier x" in script("--nodes", "2", "--no-orders", run=("--supplier", "x", "train.py"))


def test_arguments_of_the_script_may_have_any_name() -> None:
    assert "train.py --nnodes 3 --run-dir x" in script(
        "--nodes", "2", run=("train.py", *"--nnodes 3 --run-dir x".split())
    )


def test_without_sbatch_the_script_can_still_be_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "slurm", "--nodes", "2", "--now", "--", *RUN]) == 2
    assert "without --now the script is printed" in capsys.readouterr().err
    assert main(["submit", "slurm", "--nodes", "2", "--", *RUN]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash")
