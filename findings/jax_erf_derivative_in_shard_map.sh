#!/usr/bin/env bash
# JAX can't differentiate erf in a shard_map, where its arrays differ between devices.
#
# Guess: `jax.lax.erf` has a derivative in a `jax.shard_map`, as `jax.numpy.tanh` has. So has the exact GELU, which
#   BERT and ViT use.
# Behavior: tracing raises a ValueError, "Primitive ... requires varying manual axes to match".
#   The rule of the derivative has constants in it, which have no varying axes. So have the rules of erfc and of
#   `jax.nn.gelu(x, approximate=False)`. The same functions without a derivative work.
# Seen with jax 0.12.0.1, Python 3.13: tanh works; erf, erfc and the exact GELU raise.
#   jax 0.10.1, Python 3.11: all of them work.
# What helps: `check_vma=False`, which gives up the checks of sums over devices. The gradient is right then.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python in "${PYTHON:-python3}" python3.13 python3.12; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && break
done
"$python" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1
cat >"$folder/gradients.py" <<'END'
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
spec = PartitionSpec("data")
exact_gelu = functools.partial(jax.nn.gelu, approximate=False)


def works(function, differentiate):
    def shard(x):
        return jax.grad(lambda x: function(x).sum())(x) if differentiate else function(x)

    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec))
    try:
        run(jnp.linspace(-1.0, 1.0, 8))
    except ValueError as error:
        assert "varying manual axes to match" in str(error), error
        return False
    return True


functions = {"tanh": jnp.tanh, "erf": jax.lax.erf, "erfc": jax.lax.erfc, "exact GELU": exact_gelu}
for name, function in functions.items():
    assert works(function, differentiate=False), f"{name} fails without a derivative"
    has_derivative = works(function, differentiate=True)
    print(f"{name}: the derivative {'works' if has_derivative else 'raises'}")
    assert has_derivative == (name == "tanh"), f"{name} behaves in another way now"
END
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/gradients.py"
echo "as described"
