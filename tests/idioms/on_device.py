"""Runs a script with a device as torch's default, as many people's begin: on_device.py DEVICE SCRIPT"""

import runpy
import sys

import torch

if sys.argv[1] == "late":
    from tests.device_extension import late  # noqa: F401 - it registers itself
torch.set_default_device(sys.argv[1])
torch.use_deterministic_algorithms(True, warn_only=True)  # sums in one order: bits are what is compared
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
