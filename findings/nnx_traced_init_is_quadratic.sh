#!/usr/bin/env bash
# Tracing the __init__ of an NNX model takes a time that grows with the square of the number of its layers.
#
# Guess: `nnx.eval_shape` of a model with 8 times as many layers takes about 8 times as long: nothing is computed.
# Behavior: it takes more than 20 times as long. Each draw from `nnx.Rngs` writes the count of its stream by
#   `count[...] += 1`. Flax asks both arrays for their `sharding` then. Traced arrays have none, and jax 0.10 raises
#   an AttributeError whose text it finds by a walk through all equations traced so far. So each draw costs as much
#   as the trace is long. `jax.jit` and `jax.make_jaxpr` of the same function are as slow.
# Seen with flax 0.12.8 and jax 0.10.1, Python 3.11 (seconds are of one machine):
#   50 layers 1.2 s, 400 layers 33.4 s: 28 times as long
#   flax 0.12.12 and jax 0.12.0.1, Python 3.13: 0.34 s, 2.6 s: 7.5 times as long
# What helps: a newer JAX; a trace of one layer, for all that are alike, such as by nnx.vmap; or one trace, kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check jax==0.10.1 jaxlib==0.10.1 flax==0.12.8
cat >"$folder/trace.py" <<'END'
import time

from flax import nnx


def seconds(num_layers):
    def make():
        rngs = nnx.Rngs(0)
        return nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(num_layers)])

    nnx.eval_shape(make)  # what is done once
    start = time.perf_counter()
    nnx.eval_shape(make)
    return time.perf_counter() - start


few, many = seconds(50), seconds(400)
print(f"50 layers {few:.2f} s, 400 layers {many:.2f} s: {many / few:.1f} times as long")
assert many / few > 14, "grows in proportion now"
END
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/trace.py"
echo "as described"
