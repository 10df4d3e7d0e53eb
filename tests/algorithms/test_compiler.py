"""Options of XLA's compilers that jaxpar sets for its own programs."""

import types

import numpy as np
import pytest
from lib.gpus import mesh_of

from jaxpar.base.compiler import compiler_options


@pytest.mark.parametrize(
    ("platform", "value", "flags"),
    [
        ("gpu", 2, "XLA_FLAGS"),
        ("tpu", 1_000_000, "XLA_FLAGS"),
        ("tpu", 1_000_000, "LIBTPU_INIT_ARGS"),
    ],
)
def test_options_of_the_compiler_are_for_some_axes_and_below_those_of_the_user(
    platform, value, flags, monkeypatch
):
    def options(platform, stages, tensor=1):
        device, shape = (
            types.SimpleNamespace(platform=platform),
            {"stage": stages, "tensor": tensor},
        )
        mesh = types.SimpleNamespace(devices=np.full((stages,), device), shape=shape)
        return compiler_options(mesh, has_kernels=False)

    [(name, found)] = options(platform, 2).items()
    assert found == value
    assert options(platform, 1) == options("cpu", 2, 2) == {}
    assert options(platform, 1, 2) == ({name: value} if platform == "tpu" else {})
    monkeypatch.setenv(flags, f"--{name}=3")
    assert options(platform, 2) == {}


@pytest.mark.law
@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_sent_beside_kernels(fused, monkeypatch):
    """Also where a flag of the user's says otherwise; on one GPU nothing is sent at all."""
    name = "xla_gpu_disable_async_collectives"
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=ALLREDUCE")
    for number in (1, 2):
        options = compiler_options(mesh_of(number), has_kernels=fused)
        assert options == ({name: "ALLCOLLECTIVES"} if fused and number > 1 else {})
