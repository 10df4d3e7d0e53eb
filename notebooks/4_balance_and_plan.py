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
# A pipeline is as fast as its slowest stage, and eight devices can be arranged in many ways. You can compare both before you start a
# long run.

# %%
import dataclasses

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig, lm
from jaxpar.pipeline.placement import PartCosts, balance
from jaxpar.planning import estimate_step, plan, propose_shares

jaxpar.simulate_devices(8)

# %% [markdown]
# ## Layers that don't divide evenly
#
# Here seven layers go on four stages. `balance` makes ticks as short as possible. A tick takes as long as the forward and the
# backward pass of the slowest stages, including the extra work of the first and the last stage. A stage with fewer layers has an
# empty slot, which costs only memory. A backward pass costs as much as two forward passes.

# %%
plain, twice, head = (1, 2), (2, 4), (2, 4)
print("equal layers           ", balance(PartCosts((plain,) * 7), 4)[0])
print("the first one is twice ", balance(PartCosts((twice, *(plain,) * 6)), 4)[0])
print("sixteen                ", balance(PartCosts((plain,) * 16), 4)[0])
print("sixteen, and a head    ", balance(PartCosts((plain,) * 16, last=head), 4)[0])

# %% [markdown]
# ## The output head is work, too
#
# If all layers are equal, it looks fair to give each stage equally many. But the output head follows the last layer: the softmax over
# the vocabulary. A large vocabulary makes it as expensive as several layers. Here are two stages with two layers each, and the
# head (H) on the last stage. For each stage, the upper row is the prediction and the lower row is the measured step.

# %%
wordy = lm.LM(
    num_layers=4, hidden_size=128, embed_size=128, vocab_size=8192, batch_size=16, seq_len=16
)
on_last = PipelineConfig(num_microbatches=2, num_chunks=2, head="last")
two_stages = MeshConfig(stage=2, devices=(0, 1))
even = jaxpar.measure_step(wordy, Parallel(two_stages, on_last), num_steps=20)
even

# %% [markdown]
# You could move a layer away from the last stage. Or you can shard the head over all stages, so that each computes a part of the
# vocabulary at the same time. Sharding needs no guess about costs, and is jaxpar's default.

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
# The schedule doesn't know how long a stage waits for data, or for a core that another program uses. That time is in the last
# column, as in notebook 3. What the schedule does predict is the difference that the head makes.

# %% [markdown]
# ## Which mesh?
#
# jaxpar can estimate what a step sends before it is compiled, from shapes and the schedule. Here the estimates are compared with the
# compiled program, for the same model on four meshes.

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
# Bytes are estimated as one sum per axis. The compiler decides, and sends a little more or less along `tensor`. Memory is known
# once a step is compiled.
#
# Each kind of parallelism has a cost:
#
# - Data parallelism doesn't wait, but every device needs the whole model and its optimizer state.
# - A pipeline stores only some layers per device and sends little, but stages wait.
# - Tensor parallelism stores a shard per device and doesn't wait, but sends at every time step.
#
# ## A plan
#
# You can plan for hardware you don't have. Here `plan` estimates a larger model on eight hosts with eight H100 GPUs each, from
# the data sheet. It considers every mesh and every way to split batch and time.
#
# With `pip install 'jaxpar[cuda13]'` and without `num_finalists=0`, it also compiles the best 12 layouts for these GPUs. Their
# memory is then the compiler's number.

# %%
big = lm.LM(
    num_layers=8, hidden_size=2048, embed_size=2048, vocab_size=10368, batch_size=512, seq_len=64
)
plan(big, machine="h100:1x8x8", num_finalists=0, quiet=True)

# %% [markdown]
# ## Devices of different speed
#
# Suppose that the last of four data-parallel devices takes three times as long for a row. If the rows per device are proportional to
# its speed, all devices finish at the same time.

# %%
seconds = [1.0, 1.0, 1.0, 3.0]
shares = propose_shares(seconds)
print(f"seconds for an equal part {seconds} -> shares {shares}")
ends = [s * share for s, share in zip(seconds, shares, strict=True)]
print(
    f"a step takes {max(ends) / sum(shares):.2f} with them, {max(seconds) / len(seconds):.2f} with equal parts"
)

# %% [markdown]
# ## Recap
#
# - Stages don't need equal numbers of layers, and equal numbers are not equal work: the output head counts, too.
# - jaxpar estimates the time and bytes of a step before it is compiled. Memory is the compiler's number.
# - `plan` ranks all meshes that fit the devices, even for hardware you don't have.
# - Each layout has its cost: memory (data), waiting (stage), or communication (tensor).
# - Devices of different speed get unequal shares of the batch.
#
# Next, in notebook 5: a whole run.
