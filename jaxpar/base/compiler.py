"""Options of XLA's compilers that jaxpar sets for its own programs, and what each was seen to do.

They go with a program, not into the environment; a flag of the user's in XLA_FLAGS stands above them. Seen in
the programs that JAX 0.12.0.1 compiles for eight H100s and for a v5e:2x4 (`tests/test_aot.py`).

    gpu   xla_gpu_experimental_parallel_collective_overlap_limit
          With 1, XLA's own, no work with a transfer in it, such as a layer split over `tensor`, runs beside
          another transfer: the permutes of a pipeline wait. With 2 they run beside a unit's work, and the
          head's sum over `stage` beside W.

Tried, without a difference: xla_gpu_enable_latency_hiding_scheduler (it is on), xla_gpu_enable_pipelined_p2p,
xla_gpu_all_reduce_combine_threshold_bytes=0; on TPUs, which do not start and end sums apart,
xla_enable_async_all_reduce, xla_tpu_enable_async_collective_fusion (with its multiple_steps and
xla_tpu_overlap_compute_collective_tc), xla_tpu_enable_latency_hiding_scheduler,
xla_tpu_prefer_async_allgather_to_allreduce.
"""

import os

_OF_STAGES = {"gpu": {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}}


def compiler_options(platform: str, num_stages: int) -> dict[str, int]:
    """For `jax.jit`, of a training or evaluation step on a mesh of so many stages."""
    options = _OF_STAGES.get(platform, {}) if num_stages > 1 else {}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}
