"""Settings of torch that an interrupted step left behind."""

from collections.abc import Callable, Iterator

import pytest
import torch

from relight.device.torch_private import backend_flags
from relight.training.state.torch_settings import TorchSettings, adopt_settings, shared_settings

CHANGES: dict[str, Callable[[], object]] = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "precision, by a newer name": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "precision of all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "precision of convolutions": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "reductions": lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "kernels": lambda: torch.backends.mkldnn.set_flags(False),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
}


def values() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        backend_flags(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    settings = TorchSettings()
    settings.begin()
    yield
    settings.roll_back()


@pytest.mark.parametrize("name", CHANGES)
def test_they_are_put_back(name: str) -> None:
    before, settings = values(), TorchSettings()
    settings.begin()
    CHANGES[name]()
    assert values() != before
    settings.roll_back()
    assert values() == before


def test_a_change_between_steps_is_told_once() -> None:
    settings = TorchSettings()
    settings.begin()
    CHANGES["dtype"]()
    assert settings.moved() is None
    settings.commit()
    assert settings.moved() is None
    CHANGES["benchmark"]()
    assert (settings.moved() or "").startswith("torch's flags: changed between two steps")
    assert settings.moved() is None


def test_a_replacement_takes_over_those_of_all_threads() -> None:
    before, own = values(), shared_settings()
    for name in ("dtype", "precision", "precision of convolutions", "attention", "deterministic", "anomalies"):
        CHANGES[name]()
    changed, theirs = values(), shared_settings()
    adopt_settings(own)
    assert values() == before
    adopt_settings(theirs)
    assert values() == changed


def test_precision_that_has_no_older_name_any_more() -> None:
    """Torch refuses to say it by the older name once the newer one was used, in a script's first line perhaps."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    settings, theirs = TorchSettings(), shared_settings()
    settings.begin()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    settings.roll_back()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    adopt_settings(theirs)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
