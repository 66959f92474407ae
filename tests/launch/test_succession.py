"""A host that is started anew, of a job with a Lease: it joins, or the run is over, or of another command."""

from pathlib import Path

import pytest

from relight.cli import main, make_parser
from relight.cluster import lease
from relight.core.protocol.commands import EndJob
from relight.errors import UsageError
from relight.launch.succession import find_run
from relight.server.records.journal import Journal
from relight.wire.settings import JobSettings

SETTINGS = JobSettings(job="mine", script="train.py", script_arguments=("--lr", "0.1"), world_size=2)


@pytest.fixture(autouse=True)
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service account as pods have one."""
    directory = tmp_path / "account"
    directory.mkdir()
    for name in ("token", "ca.crt", "namespace"):
        (directory / name).touch()
    monkeypatch.setattr(lease, "SERVICE_ACCOUNT", directory)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")


def line(*flags: str, script: tuple[str, ...] = ("train.py", "--lr", "0.1")) -> list[str]:
    where = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:29400", "--lease", "mine")
    return ["run", *where, *flags, *script]


def run_in(directory: Path, error: str | None) -> Path:
    """Write the journal of a run that has ended with this error; None: it goes on."""
    directory.mkdir()
    journal = Journal(directory, SETTINGS, lambda *_: None)
    if error is not None:
        journal.commands(1.0, [EndJob(error=error, details="", why=error)])
    journal.close()
    return directory


def test_the_run_that_goes_on_is_joined_with_its_settings(tmp_path: Path) -> None:
    directory = run_in(tmp_path / "run", None)
    found = find_run(make_parser().parse_args(line("--run-dir", str(directory))))
    assert found is not None
    assert (found.world_size, found.run_dir) == (2, str(directory))
    failed = run_in(tmp_path / "failed", "the script raised")
    assert find_run(make_parser().parse_args(line("--run-dir", str(failed)))) is None


def test_a_run_of_another_command_is_not_joined(tmp_path: Path) -> None:
    directory = run_in(tmp_path / "run", None)
    with pytest.raises(UsageError, match=r"a run of another command that has no end \(train.py --lr 0.1\)"):
        find_run(make_parser().parse_args(line("--run-dir", str(directory), script=("train.py", "--lr", "0.2"))))
    with pytest.raises(UsageError, match="--lease: give --run-dir too"):
        find_run(make_parser().parse_args(line()))


def test_a_host_that_comes_after_the_end_of_the_run_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_in(tmp_path / "run", "")
    token = tmp_path / "token"
    token.write_text("a secret of this test's hosts")
    token.chmod(0o600)
    assert main(line("--run-dir", str(directory), "--token-file", str(token))) == 0
    assert f"the run in {directory} has finished" in capsys.readouterr().err


def test_one_node_needs_no_lease(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--lease", "mine", "train.py"]) == 2
    assert "--lease is for a job on several nodes" in capsys.readouterr().err
