"""What every test runs on: 8 simulated CPU devices, strict dtypes and ranks."""

import os

import hypothesis
import jax

# Also for the subprocesses that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# All of this before the backend starts.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example compiles. `pytest --hypothesis-profile thorough` looks further.
hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("default")
