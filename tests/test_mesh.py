"""Meshes: exact device counts, two ways to write them, simulated devices."""

import dataclasses
import math
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpar import MeshConfig, simulate_devices

SIZES = st.tuples(*[st.integers(1, 12)] * 3)


def device_ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices)


def test_axes_stand_in_order_and_tensor_is_innermost():
    mesh = MeshConfig(data=2, stage=2, tensor=2).build()
    assert mesh.axis_names == ("data", "stage", "tensor")
    assert mesh.axis_types == (AxisType.Auto,) * 3
    np.testing.assert_array_equal(device_ids(mesh), np.arange(8).reshape(2, 2, 2))


def test_tensor_stays_inside_a_process_and_data_crosses_them(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Device:
        id: int
        process_index: int
        platform: str = "cpu"
        device_kind: str = "cpu"

    # As a runtime might list them: not one process after the other.
    devices = [Device(id=number, process_index=number % 2) for number in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    built = MeshConfig(data=2, stage=2, tensor=2).build().devices
    for data in range(2):
        assert {device.process_index for device in built[data].flat} == {data}


@pytest.mark.parametrize(
    ("sizes", "expected"), [((-1, 2, 2), 2), ((2, -1, 1), 4), ((1, 1, -1), 8), ((8, 1, -1), 1)]
)
def test_one_size_is_inferred(sizes, expected):
    resolved = MeshConfig(*sizes).resolve(8)
    assert resolved.num_devices == 8
    assert list(resolved.sizes.values())[sizes.index(-1)] == expected


def test_the_size_of_a_task_s_own_axis_is_inferred():
    resolved = MeshConfig.parse("dp2expert-1pixel2").resolve(8)
    assert resolved == MeshConfig.parse("dp2expert2pixel2")


def test_a_size_is_inferred_from_the_devices_that_are_named():
    assert dict(MeshConfig(data=-1, tensor=2, devices=(7, 1, 3, 5)).build().shape) == {
        "data": 2,
        "stage": 1,
        "tensor": 2,
    }


@hypothesis.given(sizes=SIZES, inferred=st.sampled_from([None, 0, 1, 2]))
def test_resolving_fills_exactly_the_devices_that_there_are(sizes, inferred):
    asked = [-1 if number == inferred else size for number, size in enumerate(sizes)]
    assert MeshConfig(*asked).resolve(math.prod(sizes)) == MeshConfig(*sizes)


@hypothesis.given(sizes=SIZES, num_available=st.integers(1, 200))
def test_resolving_refuses_any_other_number_of_devices(sizes, num_available):
    hypothesis.assume(math.prod(sizes) != num_available)
    with pytest.raises(ValueError, match=rf"devices?, got {num_available}\n"):
        MeshConfig(*sizes).resolve(num_available)
    rest = math.prod(sizes[1:])
    if num_available % rest:
        message = f"{num_available} devices do not divide by {rest}"
        with pytest.raises(ValueError, match=message):
            MeshConfig(-1, *sizes[1:]).resolve(num_available)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp2pp3tp4", (2, 3, 4)),
        ("tp4dp2", (2, 1, 4)),
        ("tp8", (1, 1, 8)),
        ("dp-1tp2", (-1, 1, 2)),
    ],
)
def test_parse_reads_axes_and_sizes(text, sizes):
    assert MeshConfig.parse(text) == MeshConfig(*sizes)


@hypothesis.given(sizes=SIZES)
def test_parse_reads_what_a_mesh_prints(sizes):
    assert MeshConfig.parse(str(MeshConfig(*sizes))) == MeshConfig(*sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp2dp4", "'data' twice"),
        ("data=2,stage=2", "mesh 'data=2,stage=2' is not made of axes"),
        ("dp2.5", "mesh 'dp2.5' is not made of axes"),
        ("data", "mesh 'data' is not made of axes"),
        ("", "mesh '' is not made of axes"),
        ("xP2", "mesh 'xP2' is not made of axes"),
        ("dp2tp", "mesh 'dp2tp' is not made of axes"),
        ("dp0", "mesh data=0"),
        ("dp-1tp-1", "-1 for data and tensor"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeshConfig(data=0), "mesh data=0"),
        (lambda: MeshConfig(stage=-2), "mesh stage=-2\nFix: use 1 or more, or -1"),
        (lambda: MeshConfig(tensor=2.0), r"tensor=2\.0 \(float\): must be a whole number"),
        (lambda: MeshConfig(data=True), r"data=True \(bool\): must be a whole number"),
        (lambda: MeshConfig(data=-1, stage=-1), "-1 for data and stage"),
        (
            lambda: MeshConfig(devices=(0, 0)),
            r"devices=\(0, 0\)\nFix: name one or more of them, each once",
        ),
        (lambda: MeshConfig(devices=(-1,)), r"devices=\(-1,\)\nFix: .*, from 0"),
        (lambda: MeshConfig(devices=()), r"devices=\(\)"),
        (
            lambda: MeshConfig(data=16).build(),
            "needs 16 devices, got 8\n.*simulate 16",
        ),
        (
            lambda: MeshConfig(data=16).build(
                jax.devices()
            ),  # as of a machine that is only compiled for
            "got 8\nFix: use sizes that multiply to 8, name 16 with devices",
        ),
        (lambda: MeshConfig(data=-1, tensor=3).build(), "8 devices do not divide by 3"),
        (lambda: MeshConfig(data=2, devices=(0, 9)).build(), "no device 9"),
        (lambda: MeshConfig(data=2, devices=(0, 1, 2)).build(), "needs 2 devices, got 3"),
        (lambda: simulate_devices(0), r"simulate_devices\(0\): must be from 1 to 1024"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mesh_smaller_than_the_machine_takes_the_first_devices(monkeypatch):
    np.testing.assert_array_equal(device_ids(MeshConfig().build()), [[[0]]])
    mesh = MeshConfig(data=3, tensor=2).build()
    np.testing.assert_array_equal(device_ids(mesh), np.arange(6).reshape(3, 1, 2))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"needs 6 devices, got 8\n.*name 6 with devices"):
        MeshConfig(data=3, tensor=2).build()


def test_devices_are_chosen_by_number():
    mesh = MeshConfig(tensor=2, devices=(5, 2)).build()
    np.testing.assert_array_equal(device_ids(mesh), [[[5, 2]]])


def test_devices_cannot_be_simulated_once_there_are_others():
    assert jax.device_count() == 8  # the backend has started
    simulate_devices(8)  # nothing to do
    with pytest.raises(
        ValueError, match=r"simulate_devices\(4\): JAX has already started with 8 cpu device"
    ):
        simulate_devices(4)


def test_devices_may_be_simulated_after_imports_and_after_the_remedy_of_the_message():
    script = """
import os
import jax
import jax.extend
import jaxpar

jaxpar.simulate_devices(3)
assert os.environ["OPENBLAS_NUM_THREADS"] == "1", "before LAPACK is loaded"
print(jax.device_count(), dict(jaxpar.MeshConfig(tensor=-1).build().shape)["tensor"])
try:
    jaxpar.simulate_devices(2)
except ValueError as error:
    assert "restart the notebook's kernel" in str(error), error
jax.extend.backend.clear_backends()
jaxpar.simulate_devices(2)
print(jax.device_count())
jax.extend.backend.clear_backends()
jax.config.update("jax_num_cpu_devices", -1)
jax.devices()
jaxpar.simulate_devices(1)  # as many as there are
print(jax.device_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "3", "2", "1"]
