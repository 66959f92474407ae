"""Hosts of one interface: with IPv6 alone, and with a loopback interface that is down."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import missing
from relight.core.account.report import decode_report
from tests.survival.harness import DEADLINE_SECONDS, PRELOADED, PROGRAMS, Bench, Training, plain_environment

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
TRAINING = Training(ranks=2, steps=6)
IPV6_ALONE = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo"
if Path("/proc/net/if_inet6").exists():
    NO_IPV6 = ""
else:
    NO_IPV6 = "this kernel has no IPv6"


def run(tmp_path: Path, before: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`relight run` on a host of its own that has nothing but its loopback interface."""
    command = [
        *("unshare", "--net", "sh", "-c", f'{before} && exec "$@"', "sh", sys.executable, "-m", "relight.cli", "run"),
        *("--nproc-per-node", str(TRAINING.ranks), "--run-dir", str(tmp_path / "run"), *PRELOADED, *flags),
        *(str(PROGRAMS / TRAINING.program), "--steps", str(TRAINING.steps), "--save", str(tmp_path / "final")),
    ]
    environment = plain_environment()
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )


@pytest.mark.skipif(bool(NO_IPV6), reason=NO_IPV6)
def test_ipv6_alone(tmp_path: Path) -> None:
    """Controller, agent, ranks, page; and a rank is replaced. The bits are those of any other host."""
    fault = "kill rank 1 in BACKWARD of step 3"
    result = run(tmp_path, IPV6_ALONE, "--standby", "1", "--dashboard", "--chaos", fault)
    assert result.returncode == 0, result.stderr
    assert "dashboard at http://[::1]:" in result.stderr
    report = decode_report((tmp_path / "run" / "report.json").read_bytes())
    reference = Bench(lambda: tmp_path / "reference").reference(TRAINING).report
    assert report.final_version == TRAINING.steps
    assert report.final_state_digest == reference.final_state_digest
    assert len(report.recoveries) == 1


@pytest.mark.parametrize("before", ["true", "ip link set lo up && ip link set lo down"], ids=["never up", "down"])
def test_a_loopback_interface_that_is_down(tmp_path: Path, before: str) -> None:
    result = run(tmp_path, before)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("relight: the loopback interface of this host carries no connection")
    assert "ip link set lo up" in line
    assert not (tmp_path / "run").exists()
