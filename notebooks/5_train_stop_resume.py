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
# You train a language model on a text that comes with every Python: its own documentation. The run is stopped in the middle and
# resumed on other devices. Its losses are those of a run that never stopped. Then you use the model: it scores each word of a
# text, generates text, and provides the initial weights of another run.

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
# ## Stop a run
#
# A callback (`Report`) receives the events of a run, in place of the one that prints them. This one simulates Ctrl-C at step 40:
# the current step finishes, and the state is saved.


# %%
class Impatient(Report):
    def progress(self, progress, num_steps):
        print(f"step {progress.step:3}  {progress.to_text()}")
        if progress.step == 40:
            signal.raise_signal(signal.SIGINT)


stopped = jaxpar.fit(task, eight, settings("stopped"), report=Impatient())
print("stopped by", stopped.stopped_by.name, "after", len(stopped.losses), "steps")

# %% [markdown]
# ## Resume on other devices
#
# The run used 2 x 2 x 2 devices. It continues on 4 devices with data parallelism.

# %%
four = dataclasses.replace(eight, mesh=MeshConfig(data=4, devices=(0, 1, 2, 3)))
resumed = jaxpar.fit(task, four, settings("stopped"), resume=True, quiet=True)
print(f"steps {resumed.first_step + 1} to {resumed.first_step + len(resumed.losses)}")
jaxpar.show(resumed.state)

# %% [markdown]
# ## Nothing was lost
#
# A third run never stopped. Compare the losses of both, step by step:

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
# Sums in another order round differently, and training amplifies such differences. On the same mesh there would be none. Here are
# the results of the resumed run, next to what word frequencies alone would give:

# %%
for evaluation in resumed.evaluations.values():
    print(evaluation.to_text())

# %% [markdown]
# ## Score each word
#
# The run is loaded onto two stages and reads the test text through them. It returns a log-likelihood for each word, in the order of
# the text. Together they give the perplexity from above.
#
# You can also pass a text file. Here it holds what Python's own documentation says about built-in functions and types. Words
# outside the vocabulary of the run become `<unk>`.

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
# ## Generate text
#
# Rare words all become `<unk>` here, because the vocabulary has only 600 words. On one device:

# %%
print(lm.sample(resumed.out_dir, "the value of", length=40, seed=3))

# %% [markdown]
# ## Start another run with these weights
#
# The new run trains on that text, on another mesh and with a new optimizer. Embedding rows are matched by their words; rows of new
# words are randomly initialized. For comparison, another run starts with random weights only:

# %%
other = dataclasses.replace(task, corpus="builtins.txt")
for name, start in (("random", None), ("tuned", resumed.out_dir)):
    config = TrainConfig(num_steps=40, out_dir=name)
    result = jaxpar.fit(other, "dp4", config, start=start, quiet=True)
    print(f"{name:6}  {result.evaluations['test'].to_text()}")

# %% [markdown]
# You can also export the weights to a file for other programs, with the parameter names of the model:

# %%
[path] = run.export("model.safetensors")
for name, array in safetensors.numpy.load_file(path).items():
    print(f"{name:18} {array.dtype} {array.shape}")

# %% [markdown]
# ## Recap
#
# - `fit` stops after the current step when it receives a signal, and `resume=True` continues from the saved state.
# - A checkpoint stores whole arrays by their names, so you can load it on any mesh.
# - The losses are those of the run that never stopped, up to the rounding of sums.
# - A run can predict each row on any mesh, and another run can start with its weights.
# - The command line does the same: `train lm`, Ctrl-C, `train --resume --mesh dp4`, `predict`, `sample`, `train --start`, `export`.
