# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Mesh and specs: where is each number?
#
# A model is split over devices by saying two things: how the devices are arranged (the *mesh*), and which dim of
# which array goes along which axis of it (the *specs*). In jaxpar, weights carry the names of their dims, and a
# small table of rules says which axis a name goes to.
#
# Everything here runs on a laptop: eight devices are simulated on the CPU.

# %%
import jax
from flax import nnx

import jaxpar
from jaxpar import MeshConfig, Parallel, lm
from jaxpar.sharding import shardings

jaxpar.simulate_devices(8)

# %% [markdown]
# ## The mesh
#
# Three axes: `data` (groups that share a batch), `stage` (groups that share the layers), `tensor` (groups that share
# each layer). The picture shows the number of the device at each place.

# %%
mesh_config = MeshConfig(data=2, stage=2, tensor=2)
mesh_config

# %% [markdown]
# ## The rules
#
# From the name of a dim to the axes of the mesh that split it; a dim without any is whole on every device. These are
# the names of jaxpar's own layers. Yours may have others: `RULES.replace({"my dim": "tensor"})`.

# %%
for name, axes in jaxpar.RULES.table:
    print(f"{name:>8} -> {', '.join(axes) or 'whole'}")

# %% [markdown]
# ## A model, its parameters, and their specs
#
# A *task* says what is learned, here a language model; `Parallel` says how devices share the work. Shapes and names say
# where everything goes. The third column has the names of the dims, and after the slash the axes that split them; the
# fourth is what one device holds.

# %%
task = lm.LM(num_layers=4, hidden_size=64, embed_size=64, vocab_size=512, batch_size=16, seq_len=8)
state = jaxpar.init_state(task, Parallel(mesh_config))
jaxpar.show(state.params)

# %% [markdown]
# ## The shards of one array
#
# `w_h`, the recurrent weights of all four layers: `[layers, input, gates, hidden]`. Layers are split over `stage`,
# hidden units over `tensor`; the two groups of the `data` axis have copies.

# %%
jaxpar.show(state.params["layers"]["lstm"]["w_h"])

# %% [markdown]
# Each device has its piece, and nothing more. That is not just what the picture promises: the arrays themselves say so.

# %%
w_h = state.params["layers"]["lstm"]["w_h"].get_value()
for shard in w_h.addressable_shards[:4]:
    print(shard.device, shard.data.shape, shard.index[0], shard.index[3])

# %% [markdown]
# ## Another mesh, the same model
#
# Only the mesh changes. All eight devices along `tensor`:

# %%
wide_state = jaxpar.init_state(task, Parallel(MeshConfig(tensor=8)))
jaxpar.show(wide_state.params["layers"]["lstm"]["w_h"])

# %% [markdown]
# The values are the same on both meshes: the seed decides what they are, the mesh only where they are.

# %%
other = wide_state.params["layers"]["lstm"]["w_h"].get_value()
print("largest difference:", abs(jax.device_get(w_h) - jax.device_get(other)).max())

# %% [markdown]
# ## A module of your own
#
# Any Flax module can carry names. Here a dense layer is split by its outputs, because `hidden` goes to `tensor`.


# %%
def make():
    kernel_init = jaxpar.named(nnx.initializers.lecun_normal(), ("input", "hidden"))
    return nnx.state(nnx.Linear(64, 256, kernel_init=kernel_init, rngs=nnx.Rngs(0)))


layouts = shardings(nnx.eval_shape(make), mesh_config.build(), jaxpar.RULES)
params = jax.jit(make, out_shardings=layouts)()  # each device makes its own piece
jaxpar.show(params["kernel"])

# %% [markdown]
# ## What was learned
#
# - A mesh arranges devices along `data`, `stage` and `tensor`; rules send the names of dims to these axes.
# - The specs of all arrays follow from names and rules. Another mesh needs no change of the model.
# - Parameters are made where they will live: no device ever has the whole model.
#
# Next: what the devices have to send each other, in notebook 2.
