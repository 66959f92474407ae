"""torchtitan 0.3.0 knows accelerators only: let the CPU look like one. Import this before torchtitan."""

import types
from typing import Any

import torch
import torch._utils


def _answer(value: Any) -> Any:
    return lambda *_, **__: value


_cpu: Any = torch.cpu
_properties = types.SimpleNamespace(total_memory=2**34, name="cpu")
_answers: dict[str, Any] = {
    "get_device_name": "cpu",
    "get_device_properties": _properties,
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "memory_stats": {},
    "current_device": 0,
    "device_count": 1,
    "set_device": None,
}
for _name, _value in _answers.items():
    setattr(_cpu, _name, _answer(_value))
_utils: Any = torch._utils
_utils._get_available_device_type = _answer("cpu")


def prepare(trainer: Any) -> None:
    """Have FSDP2 sum gradients and divide them: gloo cannot scale while it reduces."""
    for module in trainer.model_parts[0].modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
