"""GPUs that are not there."""

import types

import numpy as np


def mesh_of(number, capability="9.0", **sizes):
    """What jaxpar reads of a mesh of GPUs; along `data`, unless sizes of axes are given."""
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability, core_count=132)
    shape = {"data": number, "stage": 1, "tensor": 1} | sizes
    return types.SimpleNamespace(devices=np.full((number,), device), shape=shape, size=number)
