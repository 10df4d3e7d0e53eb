"""A task on a mesh: the one way to its state and its compiled steps."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxpar.base.checks import require_instance
from jaxpar.config import Parallel, TrainConfig
from jaxpar.mesh import MeshConfig, find_devices
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import Task, check_task
from jaxpar.partition.partition import Partition
from jaxpar.step import state, step
from jaxpar.step.parts import Parts
from jaxpar.step.resolved import Resolved
from jaxpar.step.state import TrainState
from jaxpar.step.step import CompiledStep


class Setup(Resolved):
    """A task on devices, and what a run needs of it: its first state, and its steps.

    The public functions `init_state`, `make_train_step`, `value_and_grad`, `make_eval_step` and
    `make_predict_step` (`step.functions`) are one line each on top of it. Their docstrings describe what the
    methods return.
    """

    @classmethod
    def of(
        cls,
        task: "Task | Setup",
        parallel: Parallel | MeshConfig | str | None = None,
        train: TrainConfig | None = None,
        mesh: Mesh | None = None,
        *,
        facts: ModelFacts | None = None,
    ) -> "Setup":
        """The setup of a task; one is taken as it is.

        Where `data` is -1, all devices share the batch. If its rows do not divide by their number, as many of
        the first ones do as they divide by; not in several processes, nor where devices are named.

        Args:
          parallel: the layout on devices, or its mesh, or the shape of that such as "dp2pp2tp2"; None is the
            task's own.
          train: None is the task's own.
          mesh: None builds that of `parallel`.
          facts: of the task, from another setup of the same call; None traces its model now.
        Raises:
          ValueError: task, model, sizes and devices do not fit each other.
          OSError: the task's data cannot be read.
        """
        if isinstance(task, Setup):
            return task
        check_task(task)
        train = task.train if train is None else train
        require_instance("train", train, TrainConfig, "a TrainConfig")
        parallel = asked = Parallel.of(parallel, task.parallel)
        devices = find_devices() if mesh is None else mesh.devices.flat
        task = facts.task if facts else task.resolve()
        facts = facts or ModelFacts.of(task, devices[0].platform)
        own_axes = parallel.mesh.of_task(task.name, task.axes)
        parallel = dataclasses.replace(parallel, mesh=own_axes)
        if mesh is None:
            parallel = _shared_by_rows(facts, parallel)
            mesh = parallel.mesh.build()
        if -1 in parallel.mesh.sizes.values():
            parallel = parallel.resolve(mesh.size)
        mesh = _with_axes(mesh, parallel.mesh.sizes, task.axes)
        if dict(mesh.shape) != parallel.mesh.sizes:
            raise ValueError(
                f"mesh has the sizes {dict(mesh.shape)}, but parallel has {parallel.mesh}.\n"
                f"Fix: use parallel.mesh.build(), or change parallel."
            )
        return cls(asked, task, train, Parts.of(Partition(facts, parallel)), mesh)

    def init_state(self, seed: int | None = None) -> TrainState:
        """The state before the first step; see `functions.init_state`."""
        return state.init_state(self, self.train.seed if seed is None else seed)

    def train_step(self) -> CompiledStep:
        """One optimizer step; see `functions.make_train_step`."""
        train = self.train
        options = train.num_steps, train.clip_norm, train.allowed_skips, train.seed
        return self.cached(step.train_step, *options)

    def value_and_grad(self) -> CompiledStep:
        """Loss and gradients; see `functions.value_and_grad`."""
        return self.cached(step.value_and_grad, self.train.seed)

    def eval_step(self) -> CompiledStep:
        """The sums of a batch; see `functions.make_eval_step`."""
        return self.cached(step.eval_step)

    def predict_step(self) -> CompiledStep:
        """What the model predicts; see `functions.make_predict_step`."""
        return self.cached(step.predict_step)


def _with_axes(mesh: Mesh, sizes: Mapping[str, int], axes: Sequence[str]) -> Mesh:
    """With those of a task's own axes that it does not have, if they are of size 1."""
    if not axes or {**dict.fromkeys(axes, 1), **mesh.shape} != sizes:
        return mesh
    devices = mesh.devices.reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _shared_by_rows(facts: ModelFacts, parallel: Parallel) -> Parallel:
    """With a `data` of -1 filled in, if it is for this process alone to choose."""
    config, num_microbatches = parallel.mesh, parallel.pipeline.num_microbatches
    if config.data != -1 or config.devices is not None or parallel.shares is not None:
        return parallel
    most = config.resolve().data
    if most == 1 or jax.process_count() > 1:
        return parallel
    rows = facts.batch_size
    divide = (size for size in range(most, 0, -1) if rows % (size * num_microbatches) == 0)
    mesh = dataclasses.replace(config, data=next(divide, most))
    return dataclasses.replace(parallel, mesh=mesh)
