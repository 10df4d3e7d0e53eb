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
# A model that is too deep for one device is cut into stages, each with some of the layers. Stages wait for each other:
# this is about waiting less. Rows of the pictures are stages, time goes to the right; grey is waiting.

# %%
import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig, lm
from jaxpar.pipeline.schedules import make_schedule

jaxpar.simulate_devices(2)

# %% [markdown]
# ## Model parallelism: one works, the others wait
#
# The whole batch goes up through the stages, its gradient comes down. (A backward unit takes twice the time.)

# %%
make_schedule("gpipe", num_stages=4, num_microbatches=1)

# %% [markdown]
# ## GPipe: microbatches
#
# The batch is cut into microbatches, and while stage 1 works on the first, stage 0 takes the second
# (arXiv:1811.06965). All forward units come first, so a stage has to keep what the backward needs of all of them:
# *live units* is 4 on every stage.

# %%
make_schedule("gpipe", num_stages=4, num_microbatches=4)

# %% [markdown]
# ## 1F1B: the same bubble, less memory
#
# A backward unit runs as soon as it can (arXiv:2006.09503 and others). However many microbatches there are, a stage
# has only a few in flight.

# %%
make_schedule("1f1b", num_stages=4, num_microbatches=8)

# %% [markdown]
# ## The wavefront: chunks of time
#
# An LSTM reads a sentence from left to right, so a stage can begin with a sentence of which the stage below has read
# the first part only. One microbatch, its time cut into four chunks: the stages work on different parts of the same
# sentence, and the matrix products keep all their rows. In the backward pass the last chunk comes first.

# %%
make_schedule("1f1b", num_stages=4, num_microbatches=1, num_chunks=4)

# %% [markdown]
# ## Both
#
# Microbatches and chunks: the bubble is (S-1) / (MK + S-1), of S stages, M microbatches and K chunks.

# %%
print("bubble of 4 stages    " + "".join(f"K = {K:<6}" for K in (1, 2, 4, 8)))
for M in (1, 2, 4, 8):
    row = [make_schedule("1f1b", 4, M, K).bubble for K in (1, 2, 4, 8)]
    print(f"M = {M:<18}" + "".join(f"{bubble:<10.1%}" for bubble in row))
make_schedule("1f1b", num_stages=4, num_microbatches=4, num_chunks=2)

# %% [markdown]
# ## No idle stage
#
# Half of a backward unit concerns its own stage alone: the gradients of its weights (W). The rest, which the stage below
# waits for, is B. Once they are separate, W goes where a stage would be idle. That takes no more memory: every stage has
# slots for as many units in flight, and the later stages do not need all of theirs. With two groups of layers on each
# stage the rest of the bubble halves again. The third schedule, v, goes up through one group and down through the other:
# all stages hold as many units, and the first and the last layers share a stage.

# %%
for name in ("1f1b", "interleaved", "v"):
    for apart in (False, True):
        schedule = make_schedule(name, 4, 8, 4, zero_bubble=apart)
        print(f"{schedule.title:<16} bubble {schedule.bubble:.1%}, {schedule.num_slots} slots")
make_schedule("1f1b", num_stages=4, num_microbatches=4, num_chunks=2, zero_bubble=True)

# %% [markdown]
# ## And in reality?
#
# `measure_step` runs a training step and reads from JAX's profiler when each stage worked. Two stages here, on two
# devices simulated on the CPU; first with all of the batch at once. Below each stage's plan, in which all units of a
# stage take their median time, is what it did. H is the head, of which both stages have a part.

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
# The same batch in two microbatches and two chunks. The idle share is predicted from the schedule, for equal units and
# for units as long as they were here. What is measured has two parts. One is the schedule's: a stage waits for another
# one, longer where a unit took longer than others of its kind. The other is not: it was a stage's turn, but its data had
# not arrived, or it had no core. Simulated devices share the cores with each other and with all programs that run. The
# last column is the time that the quickest step took.

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
# ## What was learned
#
# - Layers on devices alone leave all but one device waiting. Cutting the batch (microbatches) and the time (chunks)
#   fills the pipeline: the bubble is (S-1) / (MK + S-1).
# - 1F1B bounds what a stage has to keep, GPipe does not.
# - Chunks of time need no smaller matrix products; they are there because a recurrent layer goes through time in order.
# - Units wait less, and are more work for the cores, since their matrix products are smaller: how many are best
#   is measured, or left to `plan`.
# - The schedule is a prediction. Held against what happened, it says which waiting is its own.
#
# Next: which layers on which stage, and which mesh, in notebook 4.
