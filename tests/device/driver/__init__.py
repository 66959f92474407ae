"""An emulated driver of GPUs: NVIDIA's own Python package loads it, and a file says what its devices report.

Compiled from nvml.c. What a program does with it is what it does with the real library, except for the devices.
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("nvml.c")


def why_not() -> str:
    """Return why there can be no such driver here, or an empty string."""
    if shutil.which("cc") is None:
        return "not installed: a C compiler (cc)"
    return "not installed: nvidia-ml-py" if importlib.util.find_spec("pynvml") is None else ""


class Driver:
    """The driver of one host."""

    def __init__(self, directory: Path, devices: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._says = directory / "says"
        self._says.write_text(f"devices {devices}\n")
        flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wl,-soname,libnvidia-ml.so.1")
        subprocess.run(["cc", *flags, "-o", str(directory / "libnvidia-ml.so.1"), str(_SOURCE)], check=True)
        self.variables = {"LD_LIBRARY_PATH": str(directory), "EMULATED_NVML": str(self._says)}

    def say(self, line: str) -> None:
        """Have a device report something: see nvml.c."""
        with self._says.open("a") as out:
            out.write(f"{line}\n")
