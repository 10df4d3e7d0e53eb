"""Data sheets of machines, and which one a device has."""

import re

import pytest

from jaxpar.base.sheets import SHEETS, peak_flops, sheet_of
from jaxpar.planning import find_machine


@pytest.mark.parametrize(
    ("platform", "kind", "sheet"),
    [
        ("cpu", "cpu", "cpu"), ("gpu", "NVIDIA H200", "h200"), ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA B200", "b200"), ("gpu", "NVIDIA L4", "h100"), ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5", "v5p"), ("tpu", "TPU v6 lite", "v6e"), ("new", "any", "h100"),
    ],
)  # fmt: skip
def test_devices_are_of_a_machine(platform, kind, sheet):
    class Device:
        device_kind = kind

    Device.platform = platform
    assert sheet_of(Device) == sheet


def test_every_machine_that_is_compiled_for_has_a_data_sheet():
    for name in SHEETS.keys() - {"cpu"}:
        assert find_machine(f"{name}:1x2x4").num_devices == 8
    with pytest.raises(ValueError, match="machine 'x100:1x1x1'") as error:
        find_machine("x100:1x1x1")
    assert {*re.findall(r"[vhab]\d+[ep]?", str(error.value))} == SHEETS.keys() - {"cpu"}


@pytest.mark.parametrize(
    ("platform", "kind", "dtype", "peak"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("gpu", "NVIDIA H100 80GB HBM3", "float32", 494.7e12),
        ("gpu", "NVIDIA A100-SXM4-80GB", "float16", 156e12), ("tpu", "TPU v5 lite", "bfloat16", 197e12),
        ("tpu", "TPU v6 lite", "float32", 918e12), ("gpu", "NVIDIA H100 PCIe", "bfloat16", None),
        ("gpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None), ("gpu", "NVIDIA L4", "float32", None),
        ("gpu", "NVIDIA GH200 480GB", "float32", None), ("cpu", "cpu", "float32", None),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_the_very_kind(platform, kind, dtype, peak):
    device = type("Device", (), {"platform": platform, "device_kind": kind})
    assert peak_flops(device, dtype) == peak
