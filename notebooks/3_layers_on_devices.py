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
# # 3. Layers on devices: how to keep all of them busy
#
# If a model is too deep for one device, you can split it into *stages*, each with some of the layers. Stages then wait for each
# other. This notebook shows how to make them wait less.
#
# In the pictures, each row is a stage and time runs to the right. Gray means waiting. The page
# [Pipeline schedules](../docs/concepts/pipeline.md) explains these pictures and lets you try other schedules.

# %%
import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig, lm
from jaxpar.pipeline.schedules import make_schedule

jaxpar.simulate_devices(2)

# %% [markdown]
# ## Model parallelism: one works, the others wait
#
# The whole batch moves up through the stages, and its gradient moves down. (A backward unit takes twice the time.)

# %%
make_schedule("gpipe", num_stages=4, num_microbatches=1)

# %% [markdown]
# ## GPipe: microbatches
#
# GPipe splits the batch into microbatches. While stage 1 works on the first one, stage 0 starts the second (arXiv:1811.06965). All
# forward units run first, so each stage must save the activations of all microbatches for the backward pass. In the caption,
# *live units* is therefore 4 on every stage.

# %%
make_schedule("gpipe", num_stages=4, num_microbatches=4)

# %% [markdown]
# ## 1F1B: the same bubble, less memory
#
# In the 1F1B schedule, a backward unit runs as soon as it can (arXiv:2006.09503 and others). Each stage has only a few microbatches
# in flight, however many there are.

# %%
make_schedule("1f1b", num_stages=4, num_microbatches=8)

# %% [markdown]
# ## The wavefront: time chunks
#
# An LSTM reads a sequence from left to right. So a stage can start on a sequence before the stage below has finished it. Here a
# single microbatch is split into four time chunks, and the stages work on different chunks of the same sequences. The matrix
# products keep all their rows. In the backward pass, the last chunk comes first.

# %%
make_schedule("1f1b", num_stages=4, num_microbatches=1, num_chunks=4)

# %% [markdown]
# ## Both
#
# With microbatches and time chunks, the bubble is (S-1) / (MK + S-1), for S stages, M microbatches and K time chunks.

# %%
print("bubble of 4 stages    " + "".join(f"K = {K:<6}" for K in (1, 2, 4, 8)))
for M in (1, 2, 4, 8):
    row = [make_schedule("1f1b", 4, M, K).bubble for K in (1, 2, 4, 8)]
    print(f"M = {M:<18}" + "".join(f"{bubble:<10.1%}" for bubble in row))
make_schedule("1f1b", num_stages=4, num_microbatches=4, num_chunks=2)

# %% [markdown]
# ## No idle stage
#
# A backward unit has two halves. W computes the gradients of the stage's own weights. B computes the activation gradients that
# the stage below waits for. If they are separate, W can run whenever a stage would be idle. This takes no more memory: each stage
# has slots for the same number of units in flight, and the later stages don't need all of theirs.
#
# With two groups of layers on each stage, the rest of the bubble halves again. The third schedule, v, moves up through one group and
# down through the other. All stages then save equally many units, and the first and the last layers share a stage.

# %%
for name in ("1f1b", "interleaved", "v"):
    for apart in (False, True):
        schedule = make_schedule(name, 4, 8, 4, zero_bubble=apart)
        print(f"{schedule.title:<16} bubble {schedule.bubble:.1%}, {schedule.num_slots} slots")
make_schedule("1f1b", num_stages=4, num_microbatches=4, num_chunks=2, zero_bubble=True)

# %% [markdown]
# ## And in reality?
#
# `measure_step` runs training steps and reads from JAX's profiler when each stage worked. Here are two stages, on two devices
# simulated on the CPU, first with the whole batch at once. For each stage, the upper row is the prediction, in which each unit
# takes the stage's median time. The lower row is the measured step. H is the output head, which is sharded over both stages.

# %%
task = lm.LM(
    num_layers=4, hidden_size=256, embed_size=256, vocab_size=512, batch_size=32, seq_len=16
)


def measure(num_microbatches, num_chunks):
    pipeline = PipelineConfig(num_microbatches=num_microbatches, num_chunks=num_chunks)
    return jaxpar.measure_step(task, Parallel(MeshConfig(stage=2), pipeline), num_steps=20)


naive = measure(1, 1)
naive

# %% [markdown]
# Now the same batch in two microbatches and two time chunks. The table shows the idle fraction predicted by the schedule, for equal
# units and for units with their measured times. The measured idle time has two parts:
#
# - *Schedule*: a stage waits for another stage. This takes longer if some units take longer than others of their kind.
# - *Data, cores*: it was a stage's turn, but its data had not arrived or it had no CPU core. Simulated devices use the same cores
#   as each other and as all other programs.
#
# The last column is the time of the fastest step.

# %%
filled = measure(2, 2)
print("idle      equal units  predicted  measured = schedule + data, cores   step: measured")
for name, m in (("at once", naive), ("in units", filled)):
    shares = m.schedule.bubble, m.predicted_bubble, m.bubble, m.bubble - m.late, m.late
    idle = "{:11.1%}  {:9.1%}  {:8.1%} = {:8.1%} + {:11.1%}".format(*shares)
    print(f"{name:<10}{idle}   {1000 * m.plain_seconds:11.1f} ms")
print(f"{naive.num_devices} devices on {naive.num_cores} cores")
filled

# %% [markdown]
# ## Recap
#
# - If you only place layers on devices, all but one device wait. Splitting the batch (microbatches) and the window (time chunks)
#   fills the pipeline: the bubble is (S-1) / (MK + S-1).
# - 1F1B limits the number of saved activations; GPipe doesn't.
# - Time chunks don't make matrix products smaller. They work because a recurrent layer processes time in order.
# - With more units, stages wait less, but smaller matrix products are less efficient. Measure which number is best, or let
#   `plan` choose.
# - A schedule is a prediction. Compared with a measured step, it shows which waiting time comes from the schedule itself.
#
# Next, in notebook 4: choose the layers of each stage, and a mesh.
