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
from jaxpar import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig

jaxpar.simulate_devices(8)

# %% [markdown]
# ## Layers that do not divide
#
# Seven layers on four stages. Left alone, the first stages take one more; a placement says it in other words. A stage
# with fewer layers has an empty slot, which costs nothing but its memory.

# %%
config = Config(
    mesh=MeshConfig(data=2, stage=4),
    model=ModelConfig(num_layers=7, hidden_size=64, embed_size=64, vocab_size=512),
    data=DataConfig(batch_size=16, seq_len=8),
)
for placement in ("balanced", (1, 2, 2, 2), (3, 2, 1, 1)):
    each = dataclasses.replace(config, pipeline=PipelineConfig(placement=placement))
    print(f"{placement!s:>14}: layers of the stages {each.placement}, slots {each.layer_ids}")

# %% [markdown]
# ## The head is work, too
#
# Layers are equal, so equal numbers of them look fair. But after the last layer comes the head, the softmax over the
# vocabulary, and a big vocabulary makes it as heavy as some layers. Two stages, two layers each, and the head on the
# last of them: below each stage's plan, what it did.

# %%
two_stages = Config(
    mesh=MeshConfig(stage=2, devices=(0, 1)),
    model=ModelConfig(num_layers=4, hidden_size=128, embed_size=128, vocab_size=8192),
    pipeline=PipelineConfig(num_microbatches=2, num_chunks=2, head="last"),
    data=DataConfig(batch_size=16, seq_len=16),
)
even = jaxpar.measure_step(two_stages)
even

# %% [markdown]
# A layer may move away from the last stage, or all stages may share the head, each with a part of the vocabulary. The
# second needs no guess, and is what jaxpar does if it is told nothing.

# %%
shared = dataclasses.replace(
    two_stages, pipeline=dataclasses.replace(two_stages.pipeline, head="sharded")
)
split = jaxpar.measure_step(shared)
split

# %%
for name, measured in (("head on the last stage", even), ("head on all stages", split)):
    first, last = (1000 * seconds for seconds in measured.busy_seconds)
    print(
        f"{name:>22}: stage 0 works {first:.0f} ms, stage 1 {last:.0f} ms; idle {measured.bubble:.0%}"
    )

# %% [markdown]
# ## Which mesh?
#
# Four ways to arrange eight devices, for one model. The bubble is the schedule's; what a device sends in a step and the
# memory it needs are read from the compiled programs.

# %%
model = ModelConfig(num_layers=4, hidden_size=128, embed_size=128, vocab_size=1024)
print("mesh        bubble   sent by a device   memory of a device")
for shape in ("dp8", "tp8", "pp4dp2", "dp2pp2tp2"):
    each = Config(
        mesh=MeshConfig.parse(shape),
        model=model,
        pipeline=PipelineConfig(num_microbatches=2, num_chunks=4),
        data=DataConfig(batch_size=32, seq_len=16),
    )
    report = jaxpar.inspect_step(each)
    stages = each.mesh.stage
    bubble = jaxpar.make_schedule("1f1b", stages, 2, 4).bubble if stages > 1 else 0.0
    sent = sum(total.sent_bytes for total in report.totals)
    print(
        f"{shape:<10}  {bubble:6.1%}   {sent / 1e6:13.2f} MB   {report.memory.total / 1e6:15.1f} MB"
    )

# %% [markdown]
# Data parallelism waits for nothing but needs the whole model and its optimizer on every device; a pipeline holds a part
# and sends little, but waits; tensor parallelism holds a part and does not wait, but sends at every time step, which only
# close devices do quickly. Along which axis it is sent, and by which layer, the report says as well:

# %%
for total in report.totals:
    print(f"{' and '.join(total.axes):>16}: {total.sent_bytes / 1e3:8.1f} kB in {total.count} runs")

# %% [markdown]
# ## Devices that differ
#
# Of four data-parallel devices, say that the last takes three times as long for a row. Shares of the batch that are
# proportional to speed let all of them end at the same time.

# %%
seconds = [1.0, 1.0, 1.0, 3.0]
shares = jaxpar.propose_shares(seconds)
print(f"seconds for an equal part {seconds} -> shares {shares}")
ends = [s * share for s, share in zip(seconds, shares, strict=True)]
print(
    f"a step takes {max(ends) / sum(shares):.2f} with them, {max(seconds) / len(seconds):.2f} with equal parts"
)

# %% [markdown]
# ## What was learned
#
# - Stages need not have equal numbers of layers, and equal numbers are not equal work: the head counts.
# - Bubble, bytes and memory of a mesh are known before it is rented: from the schedule and from the compiled program.
# - Each arrangement pays elsewhere: in memory (data), in waiting (stage), or in what is sent (tensor).
# - Devices that differ take unequal shares.
#
# Next: a whole run, in notebook 5.
