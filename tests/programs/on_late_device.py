"""Runs another program on the late device (tests/device_extension): on_late_device.py PROGRAM ARGUMENTS"""

import runpy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.device_extension import late, planted

accelerator = torch.accelerator.current_accelerator()
assert accelerator is not None
assert accelerator.type == late.NAME
planted.plant()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
