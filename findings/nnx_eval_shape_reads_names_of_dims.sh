#!/usr/bin/env bash
# nnx.eval_shape takes the names of a variable's dims for axes of the mesh, inside of jax.shard_map.
#
# Guess: `nnx.eval_shape` is `jax.eval_shape` for modules. It finds shapes, so it does not care where arrays are.
#   `eager_sharding=False` keeps the names of dims, such as "inputs", as plain names for rules of one's own.
# Behavior: outside of a mesh it works. Within `jax.shard_map` it builds a `NamedSharding` from these names on the
#   current mesh, whatever `eager_sharding` is, and raises a ValueError for a name that is no axis of that mesh.
#   `jax.eval_shape` of the same function works in both places.
# Seen with flax 0.12.8 and jax 0.10.1, Python 3.11:
#   outside: Model
#   inside: ValueError: Resource axis: inputs of P('inputs', None) is not found in mesh: ('data',).
#   inside, jax.eval_shape: (4, 4)
# What helps: find structures and shapes before the shard_map, or call jax.eval_shape on the state.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check jax==0.10.1 jaxlib==0.10.1 flax==0.12.8
cat >"$folder/shapes.py" <<'END'
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P


class Model(nnx.Module):
    def __init__(self):
        names = {"out_sharding": ("inputs", None), "eager_sharding": False}
        self.kernel = nnx.Param(jnp.ones((4, 4)), **names)


graphdef, state = nnx.split(Model())
print("outside:", type(nnx.eval_shape(lambda: nnx.merge(graphdef, state))).__name__)


def inside(x):
    try:
        nnx.eval_shape(lambda: nnx.merge(graphdef, state))
        print("inside: no error")
    except ValueError as error:
        print(f"inside: ValueError: {error}")
    shapes = jax.eval_shape(lambda: nnx.state(nnx.merge(graphdef, state)))
    print("inside, jax.eval_shape:", shapes["kernel"].shape)
    return x


mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
jax.shard_map(inside, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.ones(1))
END
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/shapes.py" | tee "$folder/found"
diff "$folder/found" - <<'END'
outside: Model
inside: ValueError: Resource axis: inputs of P('inputs', None) is not found in mesh: ('data',).
inside, jax.eval_shape: (4, 4)
END
echo "as described"
