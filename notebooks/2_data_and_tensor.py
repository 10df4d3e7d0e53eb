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
# # 2. Split the batch or the weights: what is sent?
#
# With *data parallelism*, every device has all weights and some rows of the batch, and gradients are summed. With *tensor
# parallelism*, every device has a shard of each weight and the whole batch, and activations are exchanged. Which one sends less?
# You can read the answer from the compiled program.

# %%
import dataclasses

import jax

import jaxpar
from jaxpar import MeshConfig, Parallel, lm

jaxpar.simulate_devices(8)

task = lm.LM(num_layers=2, hidden_size=64, embed_size=64, vocab_size=512, batch_size=16, seq_len=8)
layouts = {
    "one device": Parallel(MeshConfig(devices=(0,))),
    "data": Parallel(MeshConfig(data=8)),
    "tensor": Parallel(MeshConfig(tensor=8)),
}

# %% [markdown]
# ## The same result
#
# First the promise: a step on any mesh gives the loss of a single device.

# %%
tokens = jax.random.randint(jax.random.key(1), (16, 9), 0, 512)
batch = lm.Batch(tokens[:, :-1], tokens[:, 1:], starts=True)
for name, parallel in layouts.items():
    step = jaxpar.make_train_step(task, parallel)
    _, metrics = step(jaxpar.init_state(task, parallel), batch)
    print(f"{name:>10}: loss {metrics.loss:.6f}, norm of the gradient {metrics.grad_norm:.6f}")

# %% [markdown]
# ## Data parallelism: gradients are summed once
#
# The table shows the collectives of the compiled step, their bytes, and how often they run. All gradients are sent together,
# once per step, and so is the loss.

# %%
data = jaxpar.inspect_step(task, layouts["data"])
data

# %% [markdown]
# The payload is as large as the parameters and doesn't depend on the batch. In a ring of n devices, each device sends 2 (n-1)/n
# times the payload.

# %%
state = jaxpar.init_state(task, layouts["data"])
size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
sent = sum(total.sent_bytes for total in data.totals)
print(f"parameters {size:,} bytes; 2 x 7/8 of it {2 * 7 * size // 8:,}; sent {sent:,}")

# %% [markdown]
# ## Tensor parallelism: activations are exchanged at each time step
#
# Each device computes an eighth of the hidden units of every layer, but needs all of them for the next time step.

# %%
tensor = jaxpar.inspect_step(task, layouts["tensor"])
tensor

# %% [markdown]
# These bytes depend on the rows and time steps, not on the size of the vocabulary or of the kernels. They grow with longer
# batches, while the bytes of data parallelism stay the same:

# %%
for seq_len in (8, 16):
    long = dataclasses.replace(task, seq_len=seq_len)
    sent = sum(total.sent_bytes for total in jaxpar.inspect_step(long, "tp8").totals)
    print(f"{seq_len:>3} time steps: tensor parallelism sends {sent:,} bytes")

# %% [markdown]
# ## Recap
#
# - Both strategies compute the same loss. They differ in what they send.
# - Data parallelism sends the gradients once per step, whatever the size of the batch.
# - Tensor parallelism sends activations, in every layer and at every time step, whatever the size of the weights.
# - Large weights and small batches favor tensor parallelism; small weights and large activations favor data parallelism.
#   Notebook 8 shows where the balance tips, and splits a layer by hand.
# - `inspect_step` reads these numbers from the compiled program, without running it.
#
# Next, in notebook 3: place a layer on each device, and keep all devices busy.
