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
# You split a model over devices by choosing two things:
#
# - the *mesh*: how the devices are arranged along axes;
# - the *specs*: which dim of which array is sharded over which axis.
#
# In jaxpar, weights carry the names of their dims. A small table of *rules* maps each name to an axis.
#
# You can run everything here on a laptop: the notebook simulates eight devices on the CPU.

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
# The mesh has three axes. `data` holds groups that split the batch, `stage` holds groups that split the layers, and `tensor`
# holds devices that split each layer. The picture shows the number of the device at each place.

# %%
mesh_config = MeshConfig(data=2, stage=2, tensor=2)
mesh_config

# %% [markdown]
# ## The rules
#
# Each rule maps the name of a dim to the axes of the mesh that shard it. A dim without an axis is whole on every device. These
# are the names of jaxpar's own layers. You can add your own names: `RULES.replace({"my dim": "tensor"})`.

# %%
for name, axes in jaxpar.RULES.table:
    print(f"{name:>8} -> {', '.join(axes) or 'whole'}")

# %% [markdown]
# ## A model, its parameters, and their specs
#
# A *task* is what you train, here a language model. `Parallel` is the layout: how devices divide the work. The shapes and the
# names decide where everything is stored. In the table, the third column shows the name of each dim and, after the slash, the
# axes that shard it. The fourth column shows the shard on one device.

# %%
task = lm.LM(num_layers=4, hidden_size=64, embed_size=64, vocab_size=512, batch_size=16, seq_len=8)
state = jaxpar.init_state(task, Parallel(mesh_config))
jaxpar.show(state.params)

# %% [markdown]
# ## The shards of one array
#
# `w_h` holds the recurrent weights of all four layers, with the dims `[layers, input, gates, hidden]`. The layers are sharded over
# `stage` and the hidden units over `tensor`. The two groups of the `data` axis have copies.

# %%
jaxpar.show(state.params["layers"]["lstm"]["w_h"])

# %% [markdown]
# Each device stores its shard and nothing more. The arrays themselves confirm the picture:

# %%
w_h = state.params["layers"]["lstm"]["w_h"].get_value()
for shard in w_h.addressable_shards[:4]:
    print(shard.device, shard.data.shape, shard.index[0], shard.index[3])

# %% [markdown]
# ## Another mesh, the same model
#
# Only the mesh changes. Now all eight devices are along `tensor`:

# %%
wide_state = jaxpar.init_state(task, Parallel(MeshConfig(tensor=8)))
jaxpar.show(wide_state.params["layers"]["lstm"]["w_h"])

# %% [markdown]
# The values are the same on both meshes. The seed decides what they are; the mesh decides only where they are stored.

# %%
other = wide_state.params["layers"]["lstm"]["w_h"].get_value()
print("largest difference:", abs(jax.device_get(w_h) - jax.device_get(other)).max())

# %% [markdown]
# ## Your own module
#
# You can name the dims of any Flax module. Here a dense layer is sharded by its outputs, because the rules map `hidden` to
# `tensor`.


# %%
def make():
    kernel_init = jaxpar.named(nnx.initializers.lecun_normal(), ("input", "hidden"))
    return nnx.state(nnx.Linear(64, 256, kernel_init=kernel_init, rngs=nnx.Rngs(0)))


layouts = shardings(nnx.eval_shape(make), mesh_config.build(), jaxpar.RULES)
params = jax.jit(make, out_shardings=layouts)()  # each device makes its own piece
jaxpar.show(params["kernel"])

# %% [markdown]
# ## Recap
#
# - A mesh arranges devices along `data`, `stage` and `tensor`. Rules map the names of dims to these axes.
# - The specs of all arrays follow from names and rules. You can change the mesh without changing the model.
# - Each device initializes its own shards, so no device ever stores the whole model.
#
# Next, in notebook 2: what the devices send to each other.
