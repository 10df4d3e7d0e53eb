"""A stored run, finished or not: load it, evaluate it, predict with it, export its weights."""

import dataclasses
import importlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Self

import numpy as np
from flax import nnx

from jaxpar.base.checks import require, require_instance
from jaxpar.base.display import Shown, format_shape
from jaxpar.base.files import check_output, check_path
from jaxpar.base.parts import SPLITS
from jaxpar.base.paths import local_path
from jaxpar.base.types import Json, Module
from jaxpar.data.batches import Batches
from jaxpar.hosts.agree import in_process_0
from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.sharding import array_of, named_leaves, user_name
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.training.evaluate import evaluate, in_batches
from jaxpar.training.fingerprint import describe_data
from jaxpar.training.predict import check_out, predict
from jaxpar.training.progress import Evaluation
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.weights import Outgoing, model_of, outgoing, write_weights


class Parameters(Shown, nnx.State):
    """Parameters by their names; a prompt shows names and shapes."""

    def __repr__(self) -> str:
        leaves = ((user_name(*named), array_of(named[1])) for named in named_leaves(self))
        return "\n".join(f"{name}  {format_shape(np.shape(leaf))}" for name, leaf in leaves)


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedRun:
    """A run from its folder, on devices.

    Its programs are compiled at their first use. Load the run again after a change of the task's code.

    Attributes:
      folder: folder of the run.
      setup: task, layout, mesh and settings; what the task left open is filled in.
      state: parameters, recurrent state, and the number of steps; the optimizer's state is left out.
    """

    folder: RunFolder
    setup: Setup
    state: TrainState

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.folder}: {self.setup.task.name} after step {self.step}>"
        )

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.state.step)

    @property
    def params(self) -> nnx.State:
        """The parameters, an `nnx.State` nested by their names; `jaxpar.show(run.params)` draws them."""
        params = self.setup.storage.in_stacks(self.state.params)
        return nnx.from_flat_state(nnx.to_flat_state(params), cls=Parameters)

    def model(self, *, sharded: bool = False) -> Module:
        """The task's model with these parameters: an ordinary module, as `make_model` makes it.

        A task with a `loss` gets its own Flax model back. Call its `eval()` before you predict, if it has
        dropout.

        Args:
          sharded: its arrays are sharded over the run's mesh, as they are; else all are on one device.
        """
        return model_of(self.setup, self.state, sharded=sharded)

    def evaluate(self, split: str = "valid") -> Evaluation:
        """Loss and metrics on a split of the run's data.

        Raises:
          ValueError: there is no such split, or the data have changed since the run began.
          OSError: they cannot be read.
        """
        self.folder.check_data(describe_data(self.setup))
        return evaluate(self.setup, self.state, split)

    def predict(
        self,
        data: Batches | str,
        out: str | PathLike[str] | None = None,
        *,
        quiet: bool = False,
        **sizes: int,
    ) -> dict[str, np.ndarray]:
        """The outputs of the model's method `predict` for each row of some data, by name.

        Batches that know the places of their rows, as jaxpar's do, give outputs in the order of the data:
        [N, ...] for arrays of N rows (`ArrayBatches`), or of N steps, however they are read (one series,
        packed or bucketed sequences). Others have [batches x rows, ...] in the order of their rows. Where
        nothing is predicted, such as for a step in no batch, there is NaN, or 0 among integers.

        Args:
          data: a split of the run's data, such as "test", or your own batches.
          out: a folder, for more than the memory holds: each output is a file NAME.npy there, written as it
            is predicted. None keeps all in memory; several processes need a folder that all of them see.
          quiet: shows no progress bar.
          sizes: fields of the task that differ from training, such as batch_size=1.
        Returns:
          arrays by name; those of a folder are memory-mapped.
        Raises:
          ValueError: the model has no `predict`, or it mixes rows; or batches do not fit the task.
          OSError: the data cannot be read, or the folder not be written, or it has such files.
          KeyboardInterrupt: SIGINT or SIGTERM has ended it after a batch; no prediction is kept.
        """
        use = "a split, such as 'test', or batches, such as jaxpar.ArrayBatches(arrays, batch_size)"
        require_instance("data", data, str | Batches, use)
        if out is not None:
            check_out(out)
        run = self.in_batches(**sizes)
        batches = run.batches(data) if isinstance(data, str) else data
        return predict(run.setup, run.state, batches, out, quiet=quiet)

    def in_batches(self, **sizes: int) -> Self:
        """The same run with batches of other sizes; as of `evaluate.in_batches`."""
        if not sizes:
            return self
        setup, state = in_batches(self.setup, self.state, **sizes)
        return dataclasses.replace(self, setup=setup, state=state)

    def batches(self, data: str) -> Batches:
        """The batches of a split of the run's data, in the order of evaluation.

        Raises:
          ValueError: there is no such split, or the data have changed since the run began.
          OSError: they cannot be read.
        """
        self.folder.check_data(describe_data(self.setup))
        try:
            return self.setup.task.make_batches(data)
        except (KeyError, AssertionError, NotImplementedError, TypeError) as error:
            if data in SPLITS:
                raise
            fact = f"data={data!r} is no split of task {self.setup.task.name}"
            raise ValueError(
                f"{fact} ({type(error).__name__}: {error}).\n"
                f"Fix: use {', '.join(SPLITS)}. For other rows give batches in Python, run.predict(batches)."
            ) from error

    def export(
        self, path: str | PathLike[str], *, dtype: str | None = None, torch: bool = False
    ) -> list[Path]:
        """Writes the weights as a safetensors file by the names of the model's own tree; see `write_weights`.

        Args:
          path: of the file, such as model.safetensors.
          dtype: "bfloat16", of all floating-point tensors; None leaves them as they are.
          torch: with PyTorch's names and layout, of a run whose class knows them (`lm.TextRun`).
        Returns:
          the files that were written.
        Raises:
          ValueError: `dtype` is another, or PyTorch has no such layers.
          OSError: a file cannot be written.
        """
        check_export(path)
        fact = f"dtype must be 'bfloat16' or None, got {dtype!r}"
        require(dtype in (None, "bfloat16"), f"{fact}\nFix: use one of them")
        tensors = outgoing((self.state.params, self.state.frozen), self.setup.storage)
        tensors = self._to_torch(tensors) if torch else tensors
        return write_weights(path, tensors, self._texts(), dtype)

    def _to_torch(self, tensors: Mapping[str, Outgoing]) -> Mapping[str, Outgoing]:
        """The tensors by PyTorch's names."""
        raise ValueError(
            f"torch=True (--torch) is for language models (lm), and this run is of the task "
            f"{self.setup.task.name}\nFix: leave it out"
        )

    def _texts(self) -> dict[str, str]:
        """Texts for the metadata of a file of its weights."""
        return {}

    def metrics(self) -> list[Json]:
        """The lines of metrics.jsonl."""
        return self.folder.metrics()


def check_export(path: str | PathLike[str]) -> None:
    """Checks that weights can be written there; all processes call it.

    Raises:
      ValueError, OSError: they cannot.
    """
    check_path("path", path)
    in_process_0(lambda: check_output(local_path(path)))


def load_run(
    run_dir: str | PathLike[str], mesh: MeshConfig | str = ONE_DEVICE, *, best: bool = False
) -> LoadedRun:
    """Loads a run from its folder, with its newest state.

    Of a language model it is a `lm.TextRun`, which has a vocabulary, `logits` and `sample` as well.

    Args:
      run_dir: the folder that `fit` wrote, such as runs/0001.
      mesh: mesh for the state; it may differ from that of the run.
      best: load the state with the lowest validation loss, not the newest one.
    Raises:
      ValueError: the model does not fit the mesh, or a file is damaged.
      OSError: there is no run, no checkpoint in it, or the file of its task is gone.

    Example:
      result = jaxpar.fit(task, "pp2", jaxpar.TrainConfig(num_steps=4), quiet=True)
      run = jaxpar.load_run(result.out_dir)
      print(run.step, run.evaluate("test").loss)
    """
    mesh = mesh if isinstance(mesh, MeshConfig) else MeshConfig.parse(mesh)
    folder = RunFolder(run_dir)
    setup, state = folder.restore(mesh, best=best)
    module, _, name = setup.task.run_class.partition(":")
    return getattr(importlib.import_module(module), name)(folder, setup, state)


def evaluate_run(
    folder: RunFolder, mesh: MeshConfig = ONE_DEVICE, *, best: bool = False, **sizes: int
) -> list[Evaluation]:
    """Evaluates the newest state of a run on valid and test, on any mesh.

    Args:
      best: evaluate the state with the lowest validation loss, not the newest.
      sizes: fields of the task that differ from training, such as batch_size=1.
    Raises:
      ValueError: the model does not fit the mesh, or its data have changed since the run began.
      OSError: no run, no checkpoint, or data that cannot be read.
    """
    run = LoadedRun(folder, *folder.restore(mesh, best=best))
    folder.check_data(describe_data(run.setup))
    run = run.in_batches(**sizes)
    return [evaluate(run.setup, run.state, split) for split in ("valid", "test")]
