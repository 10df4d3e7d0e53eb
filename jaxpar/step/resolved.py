"""A task with its layout resolved on devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import optax
from jax.sharding import Mesh

from jaxpar.base.checks import require
from jaxpar.base.types import Function, OptState, Params, Tree
from jaxpar.config import Parallel, TrainConfig
from jaxpar.model.facts import ModelFacts
from jaxpar.model.model import describe_value
from jaxpar.model.task import Settings, Task
from jaxpar.partition.partition import Partition
from jaxpar.partition.storage import Storage
from jaxpar.step.optimizer import given_loss
from jaxpar.step.parts import Parts
from jaxpar.step.per_layer import per_layer
from jaxpar.step.user_tree import in_user_tree

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A task, how devices share its work, and these devices. What makes states and steps takes it.

    Each part of the model is traced once for it. Make another one after a change of the code, or of what the
    code reads.

    Attributes:
      asked: how devices were to share the work, as it was given.
      task: resolved: with the sizes that follow from its data.
      train: how a run proceeds.
      parts: the task's model as pure functions, divided over the mesh.
      mesh: of real devices, or of devices that are only compiled for.
    """

    asked: Parallel
    task: Task
    train: TrainConfig
    parts: Parts
    mesh: Mesh
    _made: dict[Function, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def storage(self) -> Storage:
        """Where a state holds the variables of the model."""
        return self.parts.storage

    @property
    def partition(self) -> Partition:
        """How devices share the model."""
        return self.parts.partition

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model, whatever the devices."""
        return self.parts.facts

    @property
    def parallel(self) -> Parallel:
        """How devices share a step, with no -1 left."""
        return self.partition.parallel

    @property
    def settings(self) -> Settings:
        """What a run is made from, with everything filled in."""
        return Settings(self.task, self.parallel, self.train)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Of a run of `train.num_steps`; before it, gradients are clipped to `settings.clip_norm`.

        A task's own optimizer sees each layer's own arrays. One of an `OptimizerConfig` treats each number
        alone, and sees stacks.

        Raises:
          ValueError: the task makes something else.
        """
        with jax.ensure_compile_time_eval():  # it may make arrays, and be asked for within a trace
            made = self.task.make_optimizer(self.train.num_steps)
        require(
            hasattr(made, "init") and hasattr(made, "update"),
            f"make_optimizer of task {self.task.name} returns {describe_value(made)}.\n"
            f"Fix: return an optimizer of optax, such as optax.adam(1e-3), not an nnx.Optimizer.",
        )
        made = given_loss(made, f"the optimizer of task {self.task.name}")
        if not self.task.has_own_optimizer:
            return made
        if self.facts.cut_model is not None:
            made = in_user_tree(made)
        return _of_stored(per_layer(made, self.storage.rows_of), self.storage, self.mesh)

    def replace(self, **changes: Tree) -> Self:
        """With other fields of `train`."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, **changes))

    def cached(self, make: Callable[..., Made], *args: Any) -> Made:
        """What `make(self, *args)` returns; made once for these arguments, by this object and its copies.

        Args:
          make: what it returns depends on task, partition and mesh; of `train`, on `args` alone.
        """
        if make not in self._made or self._made[make][0] != args:
            self._made[make] = args, make(self, *args)
        return self._made[make][1]


def _of_stored(
    optimizer: optax.GradientTransformation, storage: Storage, mesh: Mesh
) -> optax.GradientTransformation:
    """An optimizer of parameters as a state has them, which gives them to another one in stacks."""
    if not storage.is_packed:
        return optimizer

    def init(params: Params) -> OptState:
        return storage.packed(optimizer.init(storage.unpacked(params, own, mesh)), mesh)

    def update(
        updates: Params, state: OptState, params: Params = None, *loss: Any
    ) -> tuple[Params, OptState]:
        kept = jax.eval_shape(optimizer.init, own)
        pairs = (updates, own), (state, kept), (params, None if params is None else own)
        trees = (storage.unpacked(*pair, mesh) for pair in pairs)
        return storage.packed(optimizer.update(*trees, *loss), mesh)

    own = storage.in_slots

    return optax.GradientTransformation(init, update)
