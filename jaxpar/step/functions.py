"""A task's first state and its compiled steps, as functions; each is one method of a `Setup`."""

from jax.sharding import Mesh

from jaxpar.config import Parallel, TrainConfig
from jaxpar.mesh import MeshConfig
from jaxpar.model.task import Task
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState
from jaxpar.step.step import CompiledStep


def init_state(
    task: Task | Setup,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
    *,
    seed: int | None = None,
) -> TrainState:
    """Makes the initial training state. Every array is initialized on its devices, shard by shard.

    The values depend on the seed and the model's sizes, not on the mesh.

    Args:
      task: or a setup, instead of the first four.
      parallel: the layout on devices, or its mesh, or the shape of that; None is the task's own.
      train: None is the task's own.
      mesh: None builds `parallel.mesh`.
      seed: None is that of `train`.
    Raises:
      ValueError: sizes do not fit the mesh or its memory; raised before anything is traced.

    Example:
      state = jaxpar.init_state(task, "dp2pp2")
      print(state.step, jax.tree.leaves(state.params)[0].sharding)
    """
    return Setup.of(task, parallel, train, mesh).init_state(seed)


def make_train_step(
    task: Task | Setup,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> CompiledStep:
    """Makes a compiled optimizer step on a global batch. The step consumes the state passed in.

    Any mesh, schedule and microbatching give the loss and the gradients of one device, to float32 rounding. A
    model that mixes rows of the batch cannot: where a step does not take the batch as a whole, its first call
    refuses it.

    A loss or gradient that is not finite changes no parameter: the step is skipped, or, where the settings do
    not allow that, the state is halted. No later step changes it then, so it is enough to look at the metrics
    from time to time; `state.release` lets it continue. An update is not looked at: one that overflows makes
    the next loss not finite.

    Args:
      task, parallel: as given to `init_state`.
      train: None takes the task's own settings.
      mesh: None builds `parallel.mesh`.
    Returns:
      (state, batch) -> (state, metrics); the batch lies on `batch_sharding` of their setup.
    Raises:
      ValueError: sizes do not fit the mesh.

    Example:
      step, state = jaxpar.make_train_step(task, "dp2pp2"), jaxpar.init_state(task, "dp2pp2")
      state, metrics = step(state, task.example_batch())
      print(metrics.loss)
    """
    return Setup.of(task, parallel, train, mesh).train_step()


def value_and_grad(
    task: Task | Setup,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> CompiledStep:
    """Makes a compiled function of loss and gradients on a global batch, for your own training loop.

    They are those that `make_train_step` updates by, with its dropout, its checks and its promise: any mesh
    gives those of one device. The rest is yours: gradients are not clipped, a batch's `rate` is not used, and
    a loss or gradient that is not finite comes back as it is. The task needs no optimizer;
    `state.opt_state` is neither read nor changed.

    Args:
      task, parallel, mesh: as for `make_train_step`.
      train: its seed is that of dropout. None takes the task's own settings.
    Returns:
      (state, batch) -> ((loss, (state, sums)), grads), as of `jax.value_and_grad(..., has_aux=True)`. The
      loss is `sums.loss / sums.weight`, float32; where that weight is 0, `sums.loss`. The state is the given
      one, which is not consumed, with one step more and the carry for the next window; its parameters are the
      same arrays. Gradients are an `nnx.State` as `state.params`, each laid out as its parameter. If the
      task has an optimizer, they may be packed (`partition.storage`): leave the optimizer out for a loop
      that looks at single parameters. A batch may be of NumPy, the whole of it in every process;
      `data.batches.place_batch` reads the rows of this process alone.
    Raises:
      ValueError: sizes do not fit the mesh.

    Example:
      step, state = jaxpar.value_and_grad(task, "dp2"), jaxpar.init_state(task, "dp2")
      (loss, (state, sums)), grads = step(state, task.example_batch())
      params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
    """
    return Setup.of(task, parallel, train, mesh).value_and_grad()


def make_eval_step(
    task: Task | Setup,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> CompiledStep:
    """The sums of a batch without dropout, compiled for the mesh.

    Args:
      task, parallel, train, mesh: as for `make_train_step`.
    Returns:
      (state, batch) -> (carry, sums); of the state parameters and carry are read.
    Raises:
      ValueError: sizes do not fit the mesh.
    """
    return Setup.of(task, parallel, train, mesh).eval_step()


def make_predict_step(
    task: Task | Setup,
    parallel: Parallel | MeshConfig | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> CompiledStep:
    """Makes a compiled function that predicts for a batch, without dropout.

    Args:
      task, parallel, train, mesh: as for `make_train_step`.
    Returns:
      (state, batch) -> (carry, outputs); of the state parameters and carry are read. Outputs are those of the
      model's `predict`, arrays by name, [rows, time, ...] or without time [rows, ...], laid out as the batch.
      For a batch that is shorter than the task's example they have its full length.
    Raises:
      ValueError: sizes do not fit the mesh, or the model does not say what it predicts.

    Example:
      step, state = jaxpar.make_predict_step(task, "dp2"), jaxpar.init_state(task, "dp2")
      carry, outputs = step(state, task.example_batch())
    """
    return Setup.of(task, parallel, train, mesh).predict_step()
