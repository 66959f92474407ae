"""The secret that the hosts of a job share: who may read its file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relight.config import read_shared_token
from relight.errors import UsageError
from relight.server.supply.choose import TOKEN_FILE

GROUP = 54321
READ = "import sys; from relight.config import read_shared_token; read_shared_token(sys.argv[1])"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another group")


def read_as(groups: tuple[int, ...], token: Path) -> str:
    """Return what a process of these groups says when it reads the file; nothing if it may."""
    command = [sys.executable, "-c", READ, str(token)]
    return subprocess.run(command, extra_groups=groups, capture_output=True, text=True, check=False).stderr


@needs_root
@pytest.mark.parametrize(
    ("mode", "owner", "group", "accepted"),
    [
        (0o440, 0, GROUP, True),  # a Secret of Kubernetes under fsGroup
        (0o640, 0, GROUP, True),
        (0o460, 0, GROUP, False),
        (0o444, 0, GROUP, False),
        (0o440, 0, GROUP + 1, False),
        (0o440, 1234, GROUP, False),
        (0o440, 0, 0, False),
        (0o600, 0, 0, True),
    ],
)
def test_a_file_that_root_lends_to_a_group_is_accepted(
    tmp_path: Path, mode: int, owner: int, group: int, accepted: bool
) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of this test's hosts")
    os.chown(token, owner, group)
    token.chmod(mode)
    assert ("can be read by others" not in read_as((GROUP,), token)) is accepted


def test_what_is_wrong_is_said_of_the_flag_or_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "absent"))
    with pytest.raises(UsageError, match=rf"{TOKEN_FILE} .*absent: No such file"):
        read_shared_token(None)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match=r"--token-file .* is no regular file"):
            read_shared_token(str(path))
