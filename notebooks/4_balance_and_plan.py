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
# # 4. Balance and plan: which layers on which stage, and which mesh?
#
# A pipeline is as fast as its slowest stage, and eight devices can be arranged in many ways. Both can be looked at
# before a long run begins.

# %%
import dataclasses

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig, lm
from jaxpar.pipeline.placement import PartCosts, balance
from jaxpar.planning import estimate_step, plan, propose_shares

jaxpar.simulate_devices(8)

# %% [markdown]
# ## Layers that do not divide
#
# Seven layers on four stages. `balance` makes ticks the shortest: the forward pass of the slowest stage and the backward
# pass of the slowest stage, whatever the layers cost, and with what the first and the last stage have to do besides. A
# stage with fewer layers has an empty slot, which costs nothing but memory. A backward pass costs two forward passes.

# %%
plain, twice, head = (1, 2), (2, 4), (2, 4)
print("equal layers           ", balance(PartCosts((plain,) * 7), 4)[0])
print("the first one is twice ", balance(PartCosts((twice, *(plain,) * 6)), 4)[0])
print("sixteen                ", balance(PartCosts((plain,) * 16), 4)[0])
print("sixteen, and a head    ", balance(PartCosts((plain,) * 16, last=head), 4)[0])

# %% [markdown]
# ## The head is work, too
#
# Layers are equal, so equal numbers of them look fair. But after the last layer comes the head, the softmax over the
# vocabulary, and a big vocabulary makes it as heavy as some layers. Two stages, two layers each, and the head (H) on the
# last of them: below each stage's plan, what it did.

# %%
wordy = lm.LM(
    num_layers=4, hidden_size=128, embed_size=128, vocab_size=8192, batch_size=16, seq_len=16
)
on_last = PipelineConfig(num_microbatches=2, num_chunks=2, head="last")
two_stages = MeshConfig(stage=2, devices=(0, 1))
even = jaxpar.measure_step(wordy, Parallel(two_stages, on_last), num_steps=20)
even

# %% [markdown]
# A layer may move away from the last stage, or all stages may share the head, each with a part of the vocabulary: then
# they have it at the same time. The second needs no guess, and is what jaxpar does by default.

# %%
on_all = dataclasses.replace(on_last, head="sharded")
split = jaxpar.measure_step(wordy, Parallel(two_stages, on_all), num_steps=20)
split

# %%
print(" " * 24 + "stage 0   stage 1    idle: predicted  measured = schedule + data, cores")
for name, m in (("head on the last stage", even), ("head on all stages", split)):
    first, last = (1000 * seconds for seconds in m.busy_seconds)
    shares = m.predicted_bubble, m.bubble, m.bubble - m.late, m.late
    idle = "{:16.1%}  {:8.1%} = {:8.1%} + {:11.1%}".format(*shares)
    print(f"{name:>22}{first:6.1f} ms {last:6.1f} ms{idle}")

# %% [markdown]
# The schedule cannot know for how long a stage waits for data, or for a core that another program of this machine has
# (the last column, as in notebook 3). What it predicts is the difference that the head makes.

# %% [markdown]
# ## Which mesh?
#
# What a step sends can be estimated before it is compiled: from shapes, and the schedule's table of ticks. Here it
# is compared with the compiled program, for the same model on four meshes.

# %%
print("mesh         sent: estimated   compiled   memory: compiled")
small = lm.LM(
    num_layers=4, hidden_size=128, embed_size=128, vocab_size=1024, batch_size=32, seq_len=16
)
for shape in ("dp8", "tp8", "pp4dp2", "dp2pp2tp2"):
    parallel = Parallel(shape, PipelineConfig(num_microbatches=2, num_chunks=4))
    cost, report = estimate_step(small, parallel), jaxpar.inspect_step(small, parallel)
    counted = sum(part.runs * part.bytes for part in cost.sent)
    sent = sum(total.bytes for total in report.totals)
    print(
        f"{shape:<10}  {counted / 1e6:14.2f} MB  {sent / 1e6:6.2f} MB"
        f"  {report.memory.total / 1e6:14.1f} MB"
    )

# %% [markdown]
# Bytes are estimated as one sum for each axis; the compiler decides, and sends a little more or less along `tensor`.
# Memory is known when a step is compiled.
#
# Data parallelism waits for nothing but needs the whole model and its optimizer on every device; a pipeline holds a part
# and sends little, but waits; tensor parallelism holds a part and does not wait, but sends at every time step.
#
# ## A plan
#
# What cannot be run here can be planned: a bigger model on eight hosts of eight H100s, by arithmetic on their data sheet.
# Every mesh and every way to cut batch and time is considered. With `pip install 'jaxpar[cuda13]'` and without
# `num_finalists=0`, the first dozen are compiled for these GPUs as well: their memory is the compiler's number then.

# %%
big = lm.LM(
    num_layers=8, hidden_size=2048, embed_size=2048, vocab_size=10368, batch_size=512, seq_len=64
)
plan(big, machine="h100:1x8x8", num_finalists=0)

# %% [markdown]
# ## Devices that differ
#
# Of four data-parallel devices, say that the last takes three times as long for a row. Shares of the batch that are
# proportional to speed let all of them end at the same time.

# %%
seconds = [1.0, 1.0, 1.0, 3.0]
shares = propose_shares(seconds)
print(f"seconds for an equal part {seconds} -> shares {shares}")
ends = [s * share for s, share in zip(seconds, shares, strict=True)]
print(
    f"a step takes {max(ends) / sum(shares):.2f} with them, {max(seconds) / len(seconds):.2f} with equal parts"
)

# %% [markdown]
# ## What was learned
#
# - Stages need not have equal numbers of layers, and equal numbers are not equal work: the head counts.
# - The time and bytes of a step can be estimated before it is compiled. Its memory is the compiler's number.
# - A plan ranks all meshes that the devices allow, even for devices that are not there.
# - Each arrangement has its price: in memory (data), in waiting (stage), or in what is sent (tensor).
# - Devices that differ take unequal shares.
#
# Next: a whole run, in notebook 5.
