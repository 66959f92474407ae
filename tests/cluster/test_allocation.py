"""Slurm's word about the nodes of a job, with a `squeue` that answers as the case says."""

from pathlib import Path

import pytest

from relight.cluster.allocation import doubt

JOB = {"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "n2"}


def squeue(directory: Path, does: str) -> None:
    directory.mkdir()
    (directory / "squeue").write_text(f"#!/bin/sh\n{does}\n")
    (directory / "squeue").chmod(0o755)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("echo 'n[1-4]'", ""),
        ("echo n2", ""),
        ('case "$*" in *--jobs=42*) echo n2 ;; esac', ""),
        ("echo 'n[1,3-4]'", "Slurm has taken n2 out of the job"),
        ("true", "Slurm has taken n2 out of the job"),  # the job is not running any more
        (
            "echo 'Unable to contact slurm controller' >&2; exit 1",
            "does not answer: Unable to contact slurm controller",
        ),
        ("exit 3", "does not answer: squeue ended with status 3"),
        ("exec sleep 60", "does not answer: squeue did not end within 3 s"),
        ("echo '%$ garbage'", "does not answer: squeue printed '%"),
    ],
)
def test_slurm_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, says: str) -> None:
    squeue(tmp_path / "bin", does)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert says in doubt(JOB)
    assert bool(doubt(JOB)) == bool(says)


def test_where_there_is_no_slurm_nothing_is_doubted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not doubt(JOB)  # as in a container
    assert not doubt({})
    assert not doubt({"SLURM_JOB_ID": "42"})
