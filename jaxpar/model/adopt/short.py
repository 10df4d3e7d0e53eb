"""A task made of functions, for a Flax model as it stands."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax
from flax import nnx

from jaxpar.base.checks import require, require_instance
from jaxpar.base.types import Arrays, Batch, Module, Outputs
from jaxpar.config import OptimizerConfig
from jaxpar.data.array import ArrayBatches
from jaxpar.data.batches import Batches
from jaxpar.data.order import flat, map_arrays, require_unmasked
from jaxpar.model.model import Sums
from jaxpar.model.task import Task
from jaxpar.sharding import RULES

MakeBatches = Callable[[str, int | None], Batches]


def adopt(
    make_model: Callable[[nnx.Rngs], Module],
    loss: Callable[[Module, Batch], "Sums | tuple[Any, Any]"],
    layers: str | None = None,
    *,
    batches: MakeBatches | Mapping[str, np.ndarray],
    optimizer: optax.GradientTransformation | OptimizerConfig = OptimizerConfig(),
    batch_size: int = 32,
    predict: Callable[[Module, Batch], Outputs] | None = None,
    rules: Mapping[str, Any] | None = None,
) -> Task:
    """Makes a task from an existing Flax model, to train it on any mesh: `jaxpar.fit(task, "dp2pp4")`.

    The short form of a `Task` with `make_model`, `loss` and `layers`, whose fields are options of the command
    line as well. A script that has `task = jaxpar.adopt(...)` is trained by `jaxpar train script.py:task`.

    Args:
      make_model: rngs -> your own `nnx.Module`.
      loss: (model, batch) -> sums over the rows of a batch, whose arrays are [rows, ...]: a
        `jaxpar.mean(losses, mask)`, (sum of the losses, number of items), or `Sums`.
      layers: where the blocks are, such as "blocks" or "backbone.layers"; see `Task.layers`.
      batches: (split, seed) -> batches, as `Task.make_batches`; or arrays [N, ...] by name, whose last tenth
        is not trained on: half of it is for valid, half for test.
      optimizer: of optax, for gradients that are clipped only if `TrainConfig.clip_norm` is given; or an
        `OptimizerConfig`, for gradients that are clipped to norm 1 by default.
      batch_size: rows of a batch, where `batches` are arrays.
      predict: (model, batch) -> predictions; see `Task.predict`.
      rules: what splits parameters: names of dims to axes ({"heads": "tensor"}), and dims of parameters by
        their paths ({"blocks.*.up.kernel": (None, "tensor")}); see `suggest_rules`.
    Raises:
      ValueError: an argument is something else.

    Example:
      def loss(model, batch):
        return jaxpar.mean((model(batch["x"]) - batch["y"]) ** 2, batch["weight"])

      task = jaxpar.adopt(Net, loss, "blocks", batches={"x": x, "y": y}, batch_size=16)
    """
    for name, function in {"make_model": make_model, "loss": loss, "predict": predict}.items():
        require(
            callable(function) or (name == "predict" and function is None),
            f"{name} of adopt is a {type(function).__name__}.\nFix: give a function.",
        )
    is_optax = isinstance(optimizer, optax.GradientTransformation)
    if not is_optax:
        use = "one of optax, such as optax.adamw(3e-4), or an OptimizerConfig"
        require_instance("optimizer", optimizer, OptimizerConfig, use)
    dims = {name: own for name, own in (rules or {}).items() if isinstance(own, tuple)}
    axes = {name: own for name, own in (rules or {}).items() if name not in dims}
    make_batches = batches if callable(batches) else _split_arrays(batches, batch_size)
    methods = {
        "make_model": lambda self, rngs: make_model(rngs),
        "loss": lambda self, model, batch: loss(model, batch),
        "make_batches": lambda self, split, seed=None: make_batches(split, seed),
        "layers": layers,
        "dims": dims,
        "rules": RULES.replace(axes),
        # The file that the functions are of: where a run finds its task again.
        "__module__": getattr(loss, "__module__", __name__),
    }
    if predict is not None:
        methods["predict"] = lambda self, model, batch: predict(model, batch)
    if is_optax:
        methods["make_optimizer"] = lambda self, num_steps: optimizer
    else:
        methods |= {"optimizer": optimizer, "__annotations__": {"optimizer": OptimizerConfig}}
    return dataclasses.dataclass(frozen=True)(type("adopted", (Task,), methods))()


def _split_arrays(arrays: Mapping[str, Arrays], batch_size: int) -> MakeBatches:
    """Batches of arrays of which the last tenth is not trained on."""
    require_instance("batches", arrays, Mapping, "a function of (split, seed), or arrays by name")
    map_arrays(lambda name, a: require_unmasked(f"batches[{name!r}]", a), arrays)
    found = map_arrays(lambda _, a: np.asarray(a), arrays)
    sizes = {a.shape[0] if a.ndim else 0 for a in flat(found).values()}
    require(
        len(sizes) == 1 and min(sizes) >= 20,
        f"batches are arrays of {sorted(sizes) or 'no'} rows; the last tenth is for valid and test.\n"
        f"Fix: give arrays of 20 rows or more, or a function of (split, seed).",
    )
    size = sizes.pop()
    cuts = 0, size - 2 * (size // 20), size - size // 20, size
    parts: dict[str, tuple[int, int]] = dict(
        zip(("train", "valid", "test"), itertools.pairwise(cuts), strict=True)
    )

    def make_batches(split: str, seed: int | None = None) -> Batches:
        start, stop = parts[split]
        return ArrayBatches(map_arrays(lambda _, a: a[start:stop], found), batch_size, seed)

    return make_batches
