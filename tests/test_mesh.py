"""Meshes: exact device counts, two ways to write them, simulated devices."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpar.mesh import MeshConfig, simulate_devices


def test_axes_stand_in_order_and_tensor_is_innermost():
    mesh = MeshConfig(data=2, stage=2, tensor=2).build()
    assert mesh.axis_names == ("data", "stage", "tensor")
    assert mesh.axis_types == (AxisType.Auto,) * 3
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


@pytest.mark.parametrize(
    ("sizes", "expected"), [((-1, 2, 2), 2), ((2, -1, 1), 4), ((1, 1, -1), 8), ((8, 1, -1), 1)]
)
def test_one_size_is_inferred(sizes, expected):
    resolved = MeshConfig(*sizes).resolve(8)
    assert resolved.num_devices == 8
    assert list(resolved.sizes.values())[sizes.index(-1)] == expected


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,stage=3,tensor=4", (2, 3, 4)),
        ("tensor=4, data=2", (2, 1, 4)),
        ("dp2pp3tp4", (2, 3, 4)),
        ("tp8", (1, 1, 8)),
        ("dp-1tp2", (-1, 1, 2)),
    ],
)
def test_parse_reads_both_forms(text, sizes):
    assert MeshConfig.parse(text) == MeshConfig(*sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2,tensr=4", "unknown axis 'tensr'.*did you mean 'tensor'"),
        ("data=2,data=4", "names the axis 'data' twice"),
        ("dp2dp4", "names the axis 'data' twice"),
        ("data=two", "cannot read 'data=two'; write data=2,stage=2,tensor=2 or dp2pp2tp2"),
        ("", "cannot read ''"),
        ("xp2", "cannot read 'xp2'"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeshConfig(data=0), "mesh data=0: use a positive whole number"),
        (lambda: MeshConfig(data=-1, stage=-1), "-1 for data and stage; only one"),
        (lambda: MeshConfig(devices=(0, 0)), r"devices=\(0, 0\) name \[0\] twice"),
        (lambda: MeshConfig(devices=(-1,)), r"devices=\(-1,\).*numbers from 0"),
        (lambda: MeshConfig(data=4).build(), "needs 4 devices, there are 8.*set one size to -1"),
        (lambda: MeshConfig(data=16).build(), "needs 16 devices, there are 8.*simulate 16 devices"),
        (lambda: MeshConfig(data=-1, tensor=3).build(), "8 devices do not divide by 3"),
        (lambda: MeshConfig(data=2, devices=(0, 9)).build(), "no device 9; numbers go from 0 to 7"),
        (lambda: MeshConfig(data=2, devices=(0, 1, 2)).build(), "needs 2 devices, there are 3"),
        (lambda: simulate_devices(0), r"simulate_devices\(0\): use at least 1"),
        (lambda: simulate_devices(4), r"simulate_devices\(4\) came too late.*8 cpu device"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    error = RuntimeError if "too late" in message else ValueError
    jax.devices()  # the backend has started
    with pytest.raises(error, match=message):
        make()


def test_devices_are_chosen_by_number():
    mesh = MeshConfig(tensor=2, devices=(5, 2)).build()
    assert [device.id for device in mesh.devices.flat] == [5, 2]


def test_simulated_devices_may_be_asked_for_after_imports():
    script = "import jax, jaxpar; jaxpar.simulate_devices(3); print(jax.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "3"
