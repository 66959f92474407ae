"""Faults of GPUs: which errors count, and how a host's devices report them. In processes with an emulated driver."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.device.faults import memory_faults, xid_fault
from relight.wire.status import Gpu
from tests.device.driver import Driver, why_not
from tests.survival.harness import DEADLINE_SECONDS

REASON = why_not()
needs_driver = pytest.mark.skipif(bool(REASON), reason=REASON)
# Prints the number of its devices, and for each line that it reads the next fault; then the sample finds no more.
ASKS = """\
import sys
from relight.device.nvidia import Gpus
gpus = Gpus.find()
print(len(gpus.sample()), flush=True)
for line in sys.stdin:
    if line.startswith("sample"):
        gpus.sample()
    print(gpus.next_fault(float(line.split()[1])), flush=True)
"""


class Watching:
    """A process that watches the devices of a driver."""

    def __init__(self, driver: Driver, **variables: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ASKS],
            env={**os.environ, **driver.variables, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.devices = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def wait(self, seconds: float = DEADLINE_SECONDS) -> str:
        """The next fault that the driver reports within this time."""
        return self._ask(f"wait {seconds}")

    def sample(self) -> str:
        """A fault that another look at all devices finds."""
        return self._ask("sample 0")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(DEADLINE_SECONDS) == 0


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path / "driver", devices=2)


@pytest.fixture
def watching(driver: Driver) -> Iterator[Watching]:
    process = Watching(driver)
    yield process
    process.end()


@needs_driver
def test_the_driver_reports_an_error_of_a_device(driver: Driver, watching: Watching) -> None:
    assert watching.devices == 2
    driver.say("xid 1 79")
    assert watching.wait() == "GPU 1: XID 79, the device has fallen off the bus"


@needs_driver
def test_errors_of_programs_are_no_faults(driver: Driver, watching: Watching) -> None:
    for xid in (13, 31, 43, 45, 68, 109, 999):
        driver.say(f"xid 0 {xid}")
    assert watching.wait() == "GPU 0: XID 999"


@needs_driver
def test_memory_errors_count_from_the_first_look_on(driver: Driver, watching: Watching) -> None:
    assert watching.sample() == ""
    driver.say("ecc 0 2")
    assert watching.sample() == "GPU 0: 2 uncorrected memory errors"
    assert watching.sample() == ""
    driver.say("ecc 0 3")
    assert watching.sample() == "GPU 0: 1 uncorrected memory error"


@needs_driver
def test_a_device_that_is_lost_is_told_once(driver: Driver, watching: Watching) -> None:
    driver.say("lost 1")
    assert watching.sample() == "GPU 1: the driver has lost the device"
    assert watching.sample() == ""


@needs_driver
def test_errors_before_the_first_look_and_of_other_devices_are_not_ours(driver: Driver) -> None:
    driver.say("ecc 1 5")
    watching = Watching(driver, CUDA_VISIBLE_DEVICES="1")
    assert watching.devices == 1
    assert watching.sample() == ""
    driver.say("xid 0 79")
    driver.say("xid 1 95")
    assert watching.wait() == "GPU 0: XID 95, an uncontained memory error"  # as the workers number it
    watching.end()


def test_what_a_device_does_not_tell_is_no_fault() -> None:
    assert memory_faults({}, [Gpu(index=0, uncorrected_errors=4)]) == ()
    assert memory_faults({0: 4}, [Gpu(index=0)]) == ()


@pytest.mark.parametrize("xid", [48, 63, 64, 74, 79, 94, 95, 119, 120, 140])
def test_errors_of_devices_are_faults(xid: int) -> None:
    assert f"XID {xid}" in xid_fault(3, xid)
