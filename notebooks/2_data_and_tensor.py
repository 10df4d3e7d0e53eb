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
# *Data parallelism*: every device has all weights and a part of the batch, and gradients are summed. *Tensor
# parallelism*: every device has a part of each weight and the whole batch, and activations are exchanged. Which one
# sends less? The compiled program knows, so we ask it.

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
# First the promise: a step on any mesh gives the loss of one device.

# %%
tokens = jax.random.randint(jax.random.key(1), (16, 9), 0, 512)
batch = lm.Batch(tokens[:, :-1], tokens[:, 1:], starts=True)
for name, parallel in layouts.items():
    step = jaxpar.make_train_step(task, parallel)
    _, metrics = step(jaxpar.init_state(task, parallel), batch)
    print(f"{name:>10}: loss {metrics.loss:.6f}, norm of the gradient {metrics.grad_norm:.6f}")

# %% [markdown]
# ## Data parallelism: gradients are summed, once
#
# The collectives of the compiled step, their bytes, and how often they run: all gradients together, once,
# and the loss.

# %%
data = jaxpar.inspect_step(task, layouts["data"])
data

# %% [markdown]
# Its payload is as big as the parameters, whatever the batch. In a ring of n devices, each sends 2 (n-1)/n of it.

# %%
state = jaxpar.init_state(task, layouts["data"])
size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
sent = sum(total.sent_bytes for total in data.totals)
print(f"parameters {size:,} bytes; 2 x 7/8 of it {2 * 7 * size // 8:,}; sent {sent:,}")

# %% [markdown]
# ## Tensor parallelism: activations are exchanged, at each time step
#
# Each device has an eighth of the hidden units of every layer, and needs all of them for the next time step.

# %%
tensor = jaxpar.inspect_step(task, layouts["tensor"])
tensor

# %% [markdown]
# None of it depends on the size of the vocabulary or of the kernels, but all of it on rows and time steps. So it grows
# with longer batches, where data parallelism stays as it is:

# %%
for seq_len in (8, 16):
    long = dataclasses.replace(task, seq_len=seq_len)
    sent = sum(total.sent_bytes for total in jaxpar.inspect_step(long, "tp8").totals)
    print(f"{seq_len:>3} time steps: tensor parallelism sends {sent:,} bytes")

# %% [markdown]
# ## What was learned
#
# - Both strategies compute the same loss; they differ in what they send.
# - Data parallelism sends the gradients, once a step, whatever the batch. Tensor parallelism sends activations, in
#   every layer and at every time step, whatever the weights.
# - So big weights and small batches ask for tensor parallelism, small weights and big activations for data parallelism:
#   notebook 8 has the line between them, and a layer split by hand.
# - `inspect_step` reads it from the compiled program, without running it.
#
# Next: a layer on each device, and how to keep all of them busy, in notebook 3.
