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
        (("--nodes", "2", "--option=partition"), RUN, "expected an option of sbatch"),
    ],
)
def test_what_makes_no_sense_is_refused(options: tuple[str, ...], run: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        script(*options, run=run)


def test_without_sbatch_the_script_can_still_be_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", "slurm", "--nodes", "2", "--now", "--", *RUN]) == 2
    assert "without --now the script is printed" in capsys.readouterr().err
    assert main(["submit", "slurm", "--nodes", "2", "--", *RUN]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash")
