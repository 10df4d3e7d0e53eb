"""The same in plain PyTorch, by mlstm-kernels or flash-linear-attention; see `speed`."""

import importlib.util
import json
import pathlib
import sys

import torch

from benchmarks.sides import serve


def gated_delta():
    """A function of a file that needs no Triton, which to import the package does."""
    package = pathlib.Path(importlib.util.find_spec("fla").origin).parent
    spec = importlib.util.spec_from_file_location(
        "naive", package / "ops" / "gated_delta_rule" / "naive.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_chunk_gated_delta_rule


def main():
    """Serves steps."""
    name, sizes = sys.argv[1:]
    T, B, N, D = json.loads(sizes)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = (B, N, T, D) if name == "mlstm" else (B, T, N, D)
    q, k, v, dy = torch.randn(4, *shape)
    k = k / k.norm(dim=-1, keepdim=True)
    a, b = torch.randn(2, *shape[:-1])
    if name == "mlstm":
        from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_custbw as run
    else:
        a, b, run = -torch.nn.functional.softplus(a), torch.sigmoid(b), gated_delta()
    xs = [x.requires_grad_() for x in (q, k, v, a, b)]

    def step():
        for x in xs:
            x.grad = None
        y = run(*xs)
        loss = ((y[0] if isinstance(y, tuple) else y) * dy).sum()
        loss.backward()
        return loss.detach()

    serve(step)


if __name__ == "__main__":
    main()
