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
# # 9. Buckets: what do lines of unequal length cost?
#
# All rows of a batch have the same length, but the lines of a text don't. The difference is padding, which is computed for nothing.
# Buckets put lines of similar length together. How many buckets should you use? More buckets need less padding. But if each length
# is a program of its own, more programs must be compiled.

# %%
import dataclasses
import time

import matplotlib.pyplot as plt
import numpy as np
from jax.experimental.serialize_executable import serialize

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig, lm
from jaxpar.analysis import inspect_compiled

jaxpar.simulate_devices(2)

# %% [markdown]
# ## The lengths of a text
#
# The text is Python's own documentation. Each line is read from the initial state. Lines longer than the 64 steps of a batch are cut
# into pieces.

# %%
task = lm.LM(
    num_layers=2,
    hidden_size=64,
    embed_size=64,
    corpus="python-docs",
    max_vocab=600,
    batch_size=16,
    seq_len=64,
    num_buckets=3,
    bucket_multiple=8,
).resolve()
lengths = task.make_batches("train").lengths_S
percent = (5, 25, 50, 75, 95)
print(f"{len(lengths):,} lines, the longest of {lengths.max()} words")
for p, length in zip(percent, np.percentile(lengths, percent), strict=True):
    print(f"{p:>2} % of them have {length:3.0f} words or fewer")

# %% [markdown]
# ## Padding by the number of buckets
#
# `choose_edges` finds the lengths with the least padding. Without stages, any length works. With stages, a length must be a multiple
# of the time chunk, here 8 steps. Empty rows count as padding, too.

# %%
numbers = (1, 2, 3, 4, 8, 16)
padding = {1: [], 8: []}  # by the multiple of which lengths are
print("buckets  any length   multiples of 8   these")
for n in numbers:
    for multiple, found in padding.items():
        buckets = dataclasses.replace(task, num_buckets=n, bucket_multiple=multiple)
        batches = buckets.make_batches("train", seed=0)
        found.append(batches.padding)
    print(f"{n:>7}  {padding[1][-1]:10.1%}  {padding[8][-1]:15.1%}   {batches.edges}")
for found in padding.values():
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.45
    assert found[2] < 0.25
    assert found[-1] < 0.15

grey = "#7d8590"  # readable on white and on black
figure, (left, right) = plt.subplots(
    1, 2, figsize=(8, 3), dpi=100, layout="constrained", facecolor="none"
)
left.hist(np.minimum(lengths, 128), bins=np.arange(0, 129, 4), color="#0072B2")
edges = task.make_batches("train").edges
for edge in edges:
    left.axvline(edge, color="#E69F00", linewidth=2)
left.set_xlabel("words of a line (128: or more); 3 buckets", color=grey)
left.set_ylabel("lines", color=grey)
for color, (multiple, found) in zip(("#56B4E9", "#D55E00"), padding.items(), strict=True):
    label = "any length" if multiple == 1 else f"multiples of {multiple}"
    right.plot(numbers, 100 * np.array(found), marker="o", color=color, label=label)
right.set_xscale("log", base=2)
right.set_xticks(numbers, map(str, numbers))
right.minorticks_off()
right.set_ylim(bottom=0)
right.set_xlabel("buckets", color=grey)
right.set_ylabel("padding, % of the steps", color=grey)
right.legend(frameon=False, labelcolor=grey)
for axes in (left, right):
    axes.set_facecolor("none")
    axes.tick_params(colors=grey)
    axes.spines[:].set_color(grey)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# A few buckets give most of the gain. With three:

# %%
batches = task.make_batches("train", seed=0)
print(batches.to_text())
example = {}
for step in range(batches.num_windows):
    batch = batches.batch(step)
    example.setdefault(batch.inputs_BT.shape[1], batch)
assert tuple(sorted(example)) == edges

# %% [markdown]
# ## Without stages: a program for each length
#
# The table shows the CPU time to compile each program, the size of the program, and its memory while it runs:


# %%
def compile_step(task, parallel, batch):
    """What runs, and what compiling it for a batch costs: seconds, bytes of the program and of its memory."""
    step = jaxpar.make_train_step(task, parallel)
    begin = time.process_time()
    compiled = step.lower(jaxpar.init_state(task, parallel), batch).compile()
    seconds = time.process_time() - begin
    memory = inspect_compiled(compiled).memory.temporary
    return (step, task, parallel), (seconds, len(serialize(compiled)[0]), memory)


def fastest(runs):
    """Seconds of the fastest of 30 steps of each length; in turn, since others may use the machine as well."""
    states = {length: jaxpar.init_state(*settings) for length, (_, *settings) in runs.items()}
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(30):
        for length, (step, *_) in runs.items():
            begin = time.perf_counter()
            states[length], metrics = step(states[length], example[length])
            metrics.loss.block_until_ready()
            seconds[length] = min(seconds[length], time.perf_counter() - begin)
    return seconds


def show(name, costs, seconds=None):
    """A line of costs; programs run one after the other, so that only one at a time needs its memory."""
    compiling, sizes, memory = zip(*costs, strict=True)
    line = f"{sum(compiling):7.1f} s  {sum(sizes) / 1e6:8.2f} MB  {max(memory) / 1e6:7.2f} MB"
    print(f"{name:14}{line}" + (f"  {1000 * seconds:8.1f} ms" if seconds else ""))


one, runs, costs = Parallel(MeshConfig(devices=(0,))), {}, {}
for length in edges:
    runs[length], costs[length] = compile_step(task, one, example[length])
on_one = fastest(runs)
print("              compiling  the program  its memory  fastest step")
for length in edges:
    show(f"{length} steps", [costs[length]], on_one[length])
show("all of them", costs.values())
compiled_more = sum(cost[0] for length, cost in costs.items() if length < 64)
assert sum(cost[1] for cost in costs.values()) > 2.5 * costs[64][1]

# %% [markdown]
# ## On stages: one program for all of them
#
# A pipeline loops over work units, and their number is an input of the program: a batch of 24 steps has 3 chunks of 8, a batch of 64
# has 8. So the program for the longest batch runs all of them. For comparison, here are also separate programs, as in tasks
# whose longest batch is shorter:

# %%
runs, costs = {}, {}
for length in edges:
    chunks = PipelineConfig(num_chunks=length // task.bucket_multiple)
    two = Parallel(MeshConfig(stage=2, devices=(0, 1)), chunks)
    shorter = dataclasses.replace(task, seq_len=length)
    runs[length], costs[length] = compile_step(shorter, two, example[length])
own, on_two = fastest(runs), fastest(dict.fromkeys(edges, runs[64]))
print("              compiling  the program  its memory  fastest step")
for length in edges:
    show(f"{length} steps", [costs[length]], own[length])
show("one each", costs.values())
show("one for all", [costs[64]])
for length in edges:
    print(f"{length:>5} steps in the one for all{1000 * on_two[length]:31.1f} ms")
assert sum(cost[1] for cost in costs.values()) > 2.5 * costs[64][1]
assert costs[64][2] == max(cost[2] for cost in costs.values())
assert on_two[edges[0]] < on_two[64]

# %% [markdown]
# ## An epoch
#
# The time of an epoch is the number of batches of each length, times the time of a step. Compare it with all lines padded to 64
# steps. Without stages, the gain must also pay for the extra compile time:

# %%
whole = dataclasses.replace(task, num_buckets=1).make_batches("train").num_windows
for name, seconds in (("one device", on_one), ("two stages", on_two)):
    bucketed = sum(bucket.num_batches * seconds[bucket.length] for bucket in batches.buckets)
    padded = whole * seconds[64]
    print(f"{name}: padded {padded:.2f} s, in buckets {bucketed:.2f} s, {padded / bucketed:.2f} x")
print(f"compiled for the two shorter lengths, without stages: {compiled_more:.1f} s")

# %% [markdown]
# ## Recap
#
# - If all rows have one length, half of the steps of this text are padding. Three buckets leave less than a quarter, eight less than 15%.
# - Without stages, each length is a program. Compile time and program memory grow with the number of buckets; the memory of a
#   step is that of the longest.
# - On stages, one program runs every length that is a multiple of its time chunk. A short batch takes fewer ticks.
# - So use a few buckets without stages, and as many as there are time chunks with stages. Here that is `--num-buckets 3` and
#   `--num-buckets 8`.
