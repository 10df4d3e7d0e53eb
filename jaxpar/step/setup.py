"""What a run, a step or a report needs to know of a task on devices, put together once."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import optax
from jax.sharding import AxisType, Mesh

from jaxpar.base.checks import require, require_instance
from jaxpar.config import Parallel, TrainConfig
from jaxpar.mesh import MeshConfig, find_devices
from jaxpar.model.facts import ModelFacts
from jaxpar.model.model import in_words
from jaxpar.model.task import Settings, Task, check_task
from jaxpar.partition.partition import Layout
from jaxpar.step.per_layer import per_layer

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Setup:
    """A task, how devices share it, and these devices: everything that was left open is filled in.

    Whatever takes a task, parallel, train and mesh takes a setup instead of all four. Each part of the model
    is traced once for a setup: make another one after a change of the code, or of what it reads.

    Attributes:
      asked: how devices were to share it, as it was given.
      task: resolved: with the sizes that its data tell.
      train: how a run proceeds.
      layout: of the task's model on the mesh.
      mesh: of real devices, or of devices that are only compiled for.
    """

    asked: Parallel
    task: Task
    train: TrainConfig
    layout: Layout
    mesh: Mesh
    _made: dict[Callable[..., Any], Any] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

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
                f"mesh has the sizes {dict(mesh.shape)}, parallel has {parallel.mesh}.\n"
                f"Fix: use parallel.mesh.build(), or change parallel."
            )
        return cls(asked, task, train, Layout(facts, parallel), mesh)

    @property
    def parallel(self) -> Parallel:
        """How devices share a step, with no -1 left."""
        return self.layout.parallel

    @property
    def settings(self) -> Settings:
        """What a run is made from, with everything filled in."""
        return Settings(self.task, self.parallel, self.train)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Of a run of `train.num_steps`; gradients are clipped before it.

        A task's own optimizer sees each layer's own arrays. One of an `OptimizerConfig` treats each number
        alone, and sees stacks.

        Raises:
          ValueError: the task makes something else.
        """
        with jax.ensure_compile_time_eval():  # it may make arrays, and be asked for within a trace
            made = self.task.make_optimizer(self.train.num_steps)
        require(
            hasattr(made, "init") and hasattr(made, "update"),
            f"make_optimizer of task {self.task.name} returns {in_words(made)}.\n"
            f"Fix: return an optimizer of optax, such as optax.adam(1e-3); an nnx.Optimizer is none.",
        )
        return per_layer(made, self.layout.rows_of) if self.task.has_own_optimizer else made

    def replace(self, **changes: Any) -> Self:
        """With other fields of `train`."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, **changes))

    def keep(self, make: Callable[..., Made], *args: Any) -> Made:
        """What `make(setup, *args)` returns, made once for these arguments by this setup and its copies.

        Args:
          make: what it returns depends on task, layout and mesh, and of `train` on `args` alone.
        """
        if make not in self._made or self._made[make][0] != args:
            self._made[make] = args, make(self, *args)
        return self._made[make][1]


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
