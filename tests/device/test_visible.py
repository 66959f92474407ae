"""Devices of this host, as the environment restricts them."""

import pytest

from relight.device.visible import count_devices, restricted_to


@pytest.mark.parametrize(
    ("named", "devices"), [(None, None), ("", []), ("-1", []), ("0, 2", ["0", "2"]), ("GPU-8a,1", ["GPU-8a", "1"])]
)
def test_the_environment_names_devices(monkeypatch: pytest.MonkeyPatch, named: str | None, devices: object) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert restricted_to() == devices


def test_none_are_counted_where_none_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_devices() == 0
