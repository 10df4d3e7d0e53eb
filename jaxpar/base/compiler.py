"""The compile cache, and options of XLA's compilers that jaxpar sets for its own programs.

The options go with a program, not into the environment; a flag of the user's in XLA_FLAGS or LIBTPU_INIT_ARGS
stands above them.
What each was seen to do in the programs that JAX 0.12.0.1 compiles for eight H100s and for a v5e:2x4
(`tests/test_aot.py`):

    gpu   xla_gpu_experimental_parallel_collective_overlap_limit
          With 1, XLA's own, no work with a transfer in it, such as a layer split over `tensor`, runs beside
          another transfer: the permutes of a pipeline wait. With 2 they run beside a unit's work, and the
          head's sum over `stage` beside W.
    gpu   xla_gpu_disable_async_collectives
          No transfer runs beside other work. A kernel that fills the GPU needs this (`nn.fused_lstm`), also
          where XLA_FLAGS say otherwise.
    tpu   xla_jf_spmd_threshold_for_windowed_einsum_mib
          A product with a gather over `tensor` becomes a loop of permutes from this size on. Stages run their
          units in branches, and all devices of a TPU must come to a permute: such a program is refused.
          Without stages such loops compute and send more: four LSTM layers of 4,096 on dp2tp4 take 230
          million cycles by the compiler's own estimate, and 2,416 MB are sent over `tensor`; without the
          loops 168 million and 1,812 MB (two of 8,192 on tp8: 283 to 204, 6,040 to 4,698). Flax transformers
          have none. So jaxpar never takes them.

Tried, without a difference: xla_gpu_enable_latency_hiding_scheduler (it is on), xla_gpu_enable_pipelined_p2p,
xla_gpu_all_reduce_combine_threshold_bytes=0; on TPUs, which do not start and end sums apart,
xla_enable_async_all_reduce, xla_tpu_enable_async_collective_fusion (with its multiple_steps and
xla_tpu_overlap_compute_collective_tc), xla_tpu_enable_latency_hiding_scheduler,
xla_tpu_prefer_async_allgather_to_allreduce.
"""

import contextlib
import os
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.base.axes import STAGE, TENSOR
from jaxpar.base.files import cache_folder

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables with flags of the user's
# By platform: for meshes with several devices along one of these axes.
OPTIONS = {
    "gpu": ((STAGE,), {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}),
    "tpu": (
        (STAGE, TENSOR),
        {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},  # larger than any
    ),
}
_ALONE: dict[str, Any] = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}


def compiler_options(mesh: Mesh, *, has_kernels: bool) -> dict[str, Any]:
    """For `jax.jit`, of a training or evaluation step.

    Args:
      has_kernels: whether kernels that fill a GPU run in it.
    """
    axes, options = OPTIONS.get(mesh.devices.flat[0].platform, ((), {}))
    own = options if any(mesh.shape[axis] > 1 for axis in axes) else {}
    return _not_in_flags(own) | (_ALONE if has_kernels and mesh.size > 1 else {})


def options_to_draw(platform: str) -> dict[str, int]:
    """For `jax.jit`, of a program that runs once, and must give the same bits.

    A CPU's is compiled in half the time: LLVM does not look for loops to vectorize. With less than that, it
    would not join products and sums as it does elsewhere.
    """
    return _not_in_flags({"xla_backend_optimization_level": 1} if platform == "cpu" else {})


def _not_in_flags(options: dict[str, int]) -> dict[str, int]:
    flags = " ".join(os.environ.get(name, "") for name in FLAGS)
    return {name: value for name, value in options.items() if name not in flags}


def use_compile_cache() -> None:
    """Keeps programs in the user's cache folder, unless JAX was told where, or not to.

    Not with JAX 0.10, whose XLA calls every cached program for CPU one of another machine, in a line of 3,000
    letters; nor where the user has no home.
    """
    config: Any = jax.config
    is_off = not config.jax_enable_compilation_cache or jax.__version_info__ < (0, 11)
    if is_off or config.jax_compilation_cache_dir is not None:
        return
    with contextlib.suppress(FileNotFoundError):
        config.update("jax_compilation_cache_dir", str(cache_folder()))
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
