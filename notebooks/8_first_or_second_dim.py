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
# # 8. Split by the first or the second dim: added or stacked?
#
# A dense layer computes `y = x w`. You can split its weights over devices by their first dim or by their second dim. Partial results
# are then *added* (all-reduce) or *stacked* (all-gather).
#
# The first example is so small that you can check all numbers by hand, on four devices. After that, you see what larger layers send,
# and how to split a whole network.

# %%
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from jax.lax import all_gather, psum
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import MeshConfig, Parallel
from jaxpar.analysis import inspect_compiled, inspect_function
from jaxpar.model.task import find_task

jaxpar.simulate_devices(8)
mesh = MeshConfig(tensor=4, devices=(0, 1, 2, 3)).build()

x = np.array([[1, 2, 0, 1], [0, 1, 1, 0], [2, 0, 1, 1], [1, 0, 0, 3]], np.float32)
w = np.array([[j % 3 + i for j in range(8)] for i in range(4)], np.float32)
y = x @ w
for name, array in {"x, 4 rows of 4 inputs": x, "w, 4 inputs x 8 outputs": w, "y = x w": y}.items():
    print(f"{name}\n{array.astype(int)}")

# %% [markdown]
# ## By the first dim: partial sums are added
#
# Each device has one row of `w`, and the input of `x` that goes with it.

# %%
jaxpar.show(jax.device_put(w, NamedSharding(mesh, P("tensor", None))))

# %% [markdown]
# Its product has the shape of `y`, but contains only one of four terms. An all-reduce adds the terms. Here is the first row of the
# batch, (1 2 0 1):


# %%
def on_devices(function, in_specs, out_specs, mesh=mesh):
    """A function of what each device holds, with collectives written out."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


rows = P(None, "tensor"), P("tensor", None)  # x by its second dim, w by its first
partial = np.asarray(on_devices(lambda x, w: (x @ w)[None], rows, P("tensor"))(x, w), int)
for device, of_all in enumerate(partial):
    terms = f"{x[0, device]:.0f} x {w[device].astype(int)}"
    print(f"device {device}  {terms} = {of_all[0]}")
added = on_devices(lambda x, w: psum(x @ w, "tensor"), rows, P())(x, w)
print(f"{'added on each':33}{np.asarray(added, int)[0]}")
np.testing.assert_array_equal(partial.sum(0), y)
np.testing.assert_array_equal(added, y)

# %% [markdown]
# ## By the second dim: parts are stacked
#
# Each device has two columns of `w` and all of `x`.

# %%
jaxpar.show(jax.device_put(w, NamedSharding(mesh, P(None, "tensor"))))

# %% [markdown]
# Its product is two finished columns of `y`. An all-gather stacks them:


# %%
def stacked(x, w):
    return all_gather(x @ w, "tensor", axis=1, tiled=True)


columns = P(), P(None, "tensor")
parts = np.asarray(on_devices(lambda x, w: (x @ w)[None], columns, P("tensor"))(x, w), int)
for device, part in enumerate(parts):
    print(f"device {device}  {x[0].astype(int)} x its columns = {part[0]}")
together = on_devices(stacked, columns, P())(x, w)
print(f"stacked on each {np.asarray(together, int)[0]}")
np.testing.assert_array_equal(np.concatenate(parts, axis=1), y)
np.testing.assert_array_equal(together, y)

# %% [markdown]
# ## Backward: the other way around
#
# The backward pass receives `dy`. The gradient of the weights, `xᵀ dy`, stays where its part of `w` is. The gradient of the inputs,
# `dy wᵀ`, is stacked where outputs were added, and added where they were stacked.
#
# Splitting the batch is the third way. It sends only the gradients of the weights, which are added. Here are the first row of `dx`, and
# all of it:


# %%
def by_first_dim(x, w, dy):
    return psum(x @ w, "tensor"), x.T @ dy, all_gather(dy @ w.T, "tensor", axis=1, tiled=True)


def by_second_dim(x, w, dy):
    return stacked(x, w), x.T @ dy, psum(dy @ w.T, "tensor")


def by_batch(x, w, dy):
    return x @ w, psum(x.T @ dy, "tensor"), dy @ w.T


first, second = P("tensor", None), P(None, "tensor")
SPLITS = {  # where x, w and dy are; and y, dw, dx
    "batch": (by_batch, (first, P(), first), (first, P(), first)),
    "first dim": (by_first_dim, (second, first, P()), (P(), first, P())),
    "second dim": (by_second_dim, (P(), second, second), (P(), second, P())),
}
dy = np.array([[(3 * n + j * j) % 4 for j in range(8)] for n in range(4)], np.float32)
for name, weights, given in (("first", first, P()), ("second", second, second)):
    product = on_devices(lambda dy, w: (dy @ w.T)[None], (given, weights), P("tensor"))
    parts = [f"{part[0]}" for part in np.asarray(product(dy, w), int)]
    print(f"by the {name:6} dim {(' ' if name == 'first' else ' + ').join(parts)}")
print(f"dx                {(dy @ w.T)[0].astype(int)}\n")
for name, split in SPLITS.items():
    for ours, plain in zip(on_devices(*split)(x, w, dy), (y, x.T @ dy, dy @ w.T), strict=True):
        np.testing.assert_array_equal(ours, plain)
    print(f"by the {name}: y, dw and dx are those of one device")

# %% [markdown]
# ## What is sent
#
# Now the same three functions on the layer of [Tim Dettmers' post](https://timdettmers.com/2014/11/09/model-parallelism-deep-learning/):
# 128 rows, weights of 1000 x 500, two devices. He counts 500,000, 128,000 and 160,000 numbers that a device sends. Here they are
# read from the compiled programs, without running them.

# %%
two = MeshConfig(tensor=2, devices=(0, 1)).build()
sent = {}
for name, (function, in_specs, out_specs) in SPLITS.items():
    arrays = (
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(two, spec))
        for shape, spec in zip(((128, 1000), (1000, 500), (128, 500)), in_specs, strict=True)
    )
    report = inspect_function(on_devices(function, in_specs, out_specs, two), *arrays)
    for c in report.collectives:
        print(f"{name:>10}  {c.op:10}  {c.shapes[0]!s:11}  {c.sent_bytes // 4:7,} numbers")
    sent[name] = sum(c.sent_bytes for c in report.collectives) // 4
    print(f"{name:>10}  {'together':23}  {sent[name]:7,}")
assert sent == {"batch": 500_000, "first dim": 128_000, "second dim": 160_000}

# %% [markdown]
# ## Where the answer flips
#
# Gradients grow with the weights, whatever the batch. Activations grow with the batch and the width. For `n` inputs, `n` outputs and
# `b` rows, the numbers to send are 2n² and 3bn. So splitting the batch is the better choice from `b = 2n/3` on.
#
# A convolution uses its weights at every place of an image. With 3x3 weights on 14x14 places, the line is 196 / 9 = 22 times lower. The
# picture is for 8 devices. On the dotted lines, one split of the dense layer sends 2 or 4 times as much as the other.

# %%
widths, batches = 2 ** np.arange(5, 15), 2 ** np.arange(3, 14)
dense = -(-2 * widths // 3)
conv = -(-2 * 9 * widths // (3 * 14 * 14))

grey = "#7d8590"  # readable on white and on black
figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=100, layout="constrained", facecolor="none")
axes.set_facecolor("none")
regions = {"dense: split the batch": batches[-1], "dense: split the weights": batches[0]}
for (label, end), color in zip(regions.items(), ("#E69F00", "#0072B2"), strict=True):
    axes.fill_between(widths, dense, end, color=color, alpha=0.35, linewidth=0, label=label)
for factor in (1 / 4, 1 / 2, 2, 4):
    axes.plot(widths, factor * np.array(dense), color=grey, linewidth=0.8, linestyle=":")
axes.plot(widths, dense, color="#D55E00", linewidth=2, label="flip of a dense layer, n x n")
axes.plot(widths, conv, color="#009E73", linewidth=2, label="of a convolution, 3x3, on 14x14")
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set(xlim=widths[[0, -1]], ylim=batches[[0, -1]])
axes.set_xticks(widths, map(str, widths))
axes.set_yticks(batches, map(str, batches))
axes.set_xlabel("n, width of the layer", color=grey)
axes.set_ylabel("b, rows of the batch", color=grey)
axes.tick_params(colors=grey)
axes.spines[:].set_color(grey)
axes.legend(frameon=False, labelcolor=grey, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
plt.show()

# %% [markdown]
# ## The hybrid
#
# A network for images has convolutions below and dense layers above. So its convolutions split the batch, and its dense layers split
# the weights by the first dim, on the same devices ("one weird trick", arXiv:1404.5997). `examples/hybrid.py` has all three
# strategies as rules.
#
# Time is measured on two devices, to suit the cores of a laptop, with two dense layers of 2,048 units. The devices share a memory, so
# sending costs little. What the hybrid saves here is the update: each device has half of the dense weights, and of their optimizer
# state.

# %%
Digits = find_task(f"{Path(jaxpar.__file__).parents[1]}/examples/hybrid.py:Digits")
sent = {}
for strategy in ("hybrid", "model", "data"):
    report = jaxpar.inspect_step(Digits(strategy=strategy), "dp8")
    sent[strategy] = sum(total.sent_bytes for total in report.totals)
    ratio = sent[strategy] / sent["hybrid"]
    print(f"{strategy:>6}: each of 8 devices sends {sent[strategy]:>9,} bytes, {ratio:.1f} x")
assert 5 < sent["data"] / sent["hybrid"] < 6
assert 4 < sent["model"] / sent["hybrid"] < 5

pair = Parallel(MeshConfig(data=2, devices=(0, 1)))
steps, states, held = {}, {}, {}
for strategy in ("data", "hybrid"):
    task = Digits(strategy=strategy, widths=(2048, 2048))
    batch = task.example_batch()
    steps[strategy] = jaxpar.make_train_step(task, pair)
    states[strategy] = jaxpar.init_state(task, pair)
    report = inspect_compiled(steps[strategy].lower(states[strategy], batch).compile())
    sent[strategy] = sum(total.sent_bytes for total in report.totals)
    held[strategy] = report.memory.arguments

fastest = dict.fromkeys(steps, float("inf"))
for _ in range(8):  # in turn, since a machine is not equally fast all the time
    for strategy, step in steps.items():
        begin = time.perf_counter()
        states[strategy], metrics = step(states[strategy], batch)
        metrics.loss.block_until_ready()
        fastest[strategy] = min(fastest[strategy], time.perf_counter() - begin)

print("\n           sent a step  weights and optimizer  fastest of 8 steps")
for name in steps:
    megabytes = f"{sent[name] / 1e6:8.1f} MB  {held[name] / 1e6:18.1f} MB"
    print(f"{name:10}{megabytes}  {1000 * fastest[name]:15.0f} ms")
ratios = [each["data"] / each["hybrid"] for each in (sent, held, fastest)]
print("ratio     {:8.1f} {:21.1f} {:18.1f}".format(*ratios))
assert ratios[0] > 10
assert ratios[1] > 1.9

# %% [markdown]
# ## Recap
#
# - By the first dim, outputs are added and the gradients of the inputs are stacked. By the second dim it is the other way around.
#   Gradients of the weights stay where the weights are.
# - With weights of 1000 x 500 and 128 rows, each of two devices sends 128,000 numbers by the first dim and 160,000 by the second.
#   It sends 500,000 if it splits the batch.
# - Split the weights for wide dense layers and small batches. Split the batch for convolutions. A formula gives the line between them.
# - A network can do both. It then sends several times less than with either alone.
# - If one layer is split by its second dim and the next by its first, the activations between them need not be stacked. See
#   `benchmarks/model_parallel`.
