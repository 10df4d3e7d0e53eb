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
# # 5. Train, stop, resume on another mesh, use
#
# A language model on text that every Python has: its own documentation. It is stopped in the middle and resumed on other
# devices, and its losses are those of a run that never stopped. Then it is used: it says how likely each word of a text is, writes
# text, and another run begins with its weights.

# %%
import builtins
import dataclasses
import logging
import signal
from pathlib import Path

import numpy as np
import safetensors.numpy

import jaxpar
from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig, Report, TrainConfig, lm

jaxpar.simulate_devices(8)

task = lm.LM(
    num_layers=2,
    hidden_size=64,
    embed_size=64,
    corpus="python-docs",
    max_vocab=600,
    batch_size=32,
    seq_len=16,
    optimizer=OptimizerConfig(learning_rate=0.01),
)
eight = Parallel("dp2pp2tp2", PipelineConfig(num_chunks=4))


def settings(out_dir):
    return TrainConfig(num_steps=100, log_every=20, out_dir=out_dir)


# %% [markdown]
# ## A run that is stopped
#
# A report is told what happens, in place of the one that prints it. This one presses Ctrl-C at step 40: the current
# step is finished, the state is saved.


# %%
class Impatient(Report):
    def progress(self, progress, num_steps):
        print(f"step {progress.step:3}  {progress.to_text()}")
        if progress.step == 40:
            signal.raise_signal(signal.SIGINT)


stopped = jaxpar.fit(task, eight, settings("stopped"), report=Impatient())
print("stopped by", stopped.stopped_by.name, "after", len(stopped.losses), "steps")

# %% [markdown]
# ## Resumed on other devices
#
# The run had 2 x 2 x 2 devices. It continues on 4, all of them data-parallel.

# %%
four = dataclasses.replace(eight, mesh=MeshConfig(data=4, devices=(0, 1, 2, 3)))
resumed = jaxpar.fit(task, four, settings("stopped"), resume=True, quiet=True)
print(f"steps {resumed.first_step + 1} to {resumed.first_step + len(resumed.losses)}")
jaxpar.show(resumed.state)

# %% [markdown]
# ## Nothing was lost
#
# A third run never stopped. The losses of both, step by step:

# %%
whole = jaxpar.fit(task, eight, settings("whole"), quiet=True)
pieced = stopped.losses + resumed.losses
for step in (1, 20, 40, 41, 60, 80, 100):
    print(
        f"step {step:3}  never stopped {whole.losses[step - 1]:.6f}  stopped {pieced[step - 1]:.6f}"
    )
largest = max(abs(a - b) / a for a, b in zip(whole.losses, pieced, strict=True))
print(f"largest difference {largest:.1e}")

# %% [markdown]
# Sums in another order round differently, and training makes such differences grow; on the same mesh there would be none.
# What was learned by then, beside what word frequencies alone would give:

# %%
for evaluation in resumed.evaluations.values():
    print(evaluation.to_text())

# %% [markdown]
# ## What it says of each word
#
# The run is loaded onto two stages and reads the test text through them. For each word there is its log-likelihood, in the
# order of the text, and together they are the perplexity from above. Another text is a file, here what Python says of its
# built-in functions and types; words outside the vocabulary of the run are `<unk>`.

# %%
run = jaxpar.load_run(resumed.out_dir, MeshConfig(stage=2, devices=(0, 1)))
likelihood = run.predict("test", quiet=True)["log_likelihood"]
print(f"{len(likelihood):,} words, perplexity {np.exp(-np.nanmean(likelihood)):.2f}")

owners = [builtins, *(thing for thing in vars(builtins).values() if isinstance(thing, type))]
members = (member for owner in owners for member in vars(owner).values())
texts = {text for member in members if isinstance(text := getattr(member, "__doc__", None), str)}
Path("builtins.txt").write_text("\n".join(sorted(texts)))
# It has words that the run does not know; without this line a warning says how many.
logging.getLogger("jaxpar").setLevel(logging.ERROR)
likelihood = run.predict("builtins.txt", quiet=True)["log_likelihood"]
print(f"{len(likelihood):,} words, perplexity {np.exp(-np.nanmean(likelihood)):.1f}")
words, tokens = run.vocabulary.words, run.vocabulary.encode(Path("builtins.txt").read_text())
for n in range(2000, 2008):
    print(f"{words[tokens[n + 1]]:10} {likelihood[n]:6.2f}")

# %% [markdown]
# ## Text
#
# Rare words are all `<unk>` here, because the vocabulary was cut to 600. On one device:

# %%
print(lm.sample(resumed.out_dir, "the value of", length=40, seed=3))

# %% [markdown]
# ## Another run begins with its weights
#
# On that text, another mesh and with a new optimizer. Rows of words are found by the words; what is new is drawn. Beside it a
# run that begins with drawn weights alone:

# %%
other = dataclasses.replace(task, corpus="builtins.txt")
for name, start in (("drawn", None), ("tuned", resumed.out_dir)):
    config = TrainConfig(num_steps=40, out_dir=name)
    result = jaxpar.fit(other, "dp4", config, start=start, quiet=True)
    print(f"{name}  {result.evaluations['test'].to_text()}")

# %% [markdown]
# As a file for other programs, whose names are those of the model's own tree:

# %%
[path] = run.export("model.safetensors")
for name, array in safetensors.numpy.load_file(path).items():
    print(f"{name:18} {array.dtype} {array.shape}")

# %% [markdown]
# ## What was learned
#
# - `fit` ends after the current step when it is told to stop, and `resume=True` continues from the saved state.
# - A state is saved whole, by the names of its arrays; any mesh can load it.
# - The losses are those of the run that never stopped, to the rounding of sums.
# - A run says of each row what its model predicts, on any mesh; another run begins with its weights.
# - The command line does the same: `train lm`, Ctrl-C, `train --resume --mesh dp4`, `predict`, `sample`, `train --start`, `export`.
