"""Where everything of a task's model lies: layers in slots, parameters and state on the axes of a mesh.

A task says what the model is, a `Parallel` how devices share it; here the two meet, before anything is made:
all is known from shapes. `state` makes the arrays, `step` computes with them.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxpar.at import At
from jaxpar.axes import BATCH, DATA, STAGE
from jaxpar.batches import STARTS
from jaxpar.config import Parallel
from jaxpar.fields import check_takes
from jaxpar.jaxprs import handed_on
from jaxpar.mesh import MeshConfig
from jaxpar.model import NO_SLOTS, Stack, check_variables, checked_sums, in_words, values
from jaxpar.pipeline.placement import Slots, make_slots, resolve_placement
from jaxpar.pipeline.split import SplitLayer
from jaxpar.sharding import PARAM_SHAPE, Layout, Rules, is_variable, off_stages, split_over_data
from jaxpar.task import Task
from jaxpar.trees import shape_of, zeros
from jaxpar.work import count_flops, used_inputs

LAYERS_OF_MODEL = "layers"  # the attribute of a model that is its stack


class ModelLayout:
    """A task's model on devices.

    Attributes:
      task, parallel: what it is made from; `parallel` has no -1 left.
      batch: `ShapeDtypeStruct`s of a batch, as users have it; `batch_size` its rows, `num_steps` its time
        steps (None if the model has no time).
      time_major: of the model.
      head: "last" or "sharded": where what follows the layers runs in a pipeline.
      kinds: names of the kinds of layers; `kind_of` the number of each layer's kind; `unroll` of the stack.
      slots: where each layer lies.
      rules: how parameters lie while a step computes.
      param_rules, opt_rules, carry_rules: how parameters, optimizer state and carry lie between steps.
      plain: the model of shapes as the task makes it, not yet in its slots.
      graphdef: of the model in its slots.
      params, frozen: `nnx.State`s of shapes: what is trained, and all other variables.
      x: shapes of what goes through the layers, of a whole batch.
      num_sums: how many numbers `last` gives.
    """

    def __init__(self, task: Task, parallel: Parallel):
        """Looks at shapes; nothing is made.

        Raises:
          ValueError: task and parallel do not fit each other, or the model is not one.
        """
        self.task, self.parallel = task, parallel
        self.batch = _example_of(task)
        plain = _checked_model(task, lambda: nnx.eval_shape(lambda: self._make(0)))
        check_variables(f"the model of task {task.name}", nnx.state(plain))
        self.time_major = bool(getattr(plain, "time_major", True))
        self.batch_size, self.num_steps = _sizes_of(task, self.batch, self.time_major)
        parallel.check(self.batch_size, self.num_steps)
        if parallel.num_segments > 1 and task.variable_length:
            raise ValueError(
                f"remat_keeps='carries': segments are for batches of one length, those of task {task.name} "
                f"have any; use remat_keeps='device' or 'host'"
            )
        self.kinds, self.kind_of = plain.layers.kinds, plain.layers.kind_of
        self.unroll = plain.layers.unroll
        self.head = self._choose_head(plain)
        rules = task.rules
        is_last = parallel.mesh.stage > 1 and self.head == "last"
        found = rules_of(rules, parallel, head_is_last=is_last)
        self.rules, self.param_rules, self.opt_rules, self.carry_rules = found
        self.divides_by_hand = self.rules.axes_of(BATCH) == (DATA,)
        if not self.divides_by_hand and parallel.runs_in_units:
            raise ValueError(
                f"the rules of task {task.name} split the batch over {self.rules.axes_of(BATCH)}; "
                f"pipelines, microbatches and shares need it split over {DATA!r} alone: use stage=1, "
                f"num_microbatches=1 and equal shares, or other rules"
            )
        self._check_layers(plain)
        self.slots = self._place(plain)
        model = nnx.eval_shape(lambda: self.make(0))
        self.graphdef, self.params, self.frozen = self.split(model)

    # ---- making and taking apart ----

    def make(self, seed: int | jax.Array) -> Any:
        """The model with its values, of a seed or a key, its layers in their slots. Call under `jit`."""
        model = self._make(seed)
        if self.slots.layers:
            model.layers.place(self.slots)
        for _, variable in nnx.iter_graph(model):
            if is_variable(variable):
                variable.set_metadata(PARAM_SHAPE, tuple(variable.shape))
        return model

    def _make(self, seed: int | jax.Array) -> Any:
        with nnx.use_eager_sharding(False):
            return self.task.make_model(nnx.Rngs(seed))

    def split(self, model: Any) -> tuple[Any, nnx.State, nnx.State]:
        """Structure, what is trained, and all other variables of a model."""
        trained = nnx.All(nnx.Param, nnx.Not(self.task.frozen))
        graphdef, params, frozen = nnx.split(model, trained, ...)
        return graphdef, params, frozen

    def merge(self, params: nnx.State, frozen: nnx.State) -> Any:
        """The model with these values."""
        return nnx.merge(self.graphdef, params, frozen)

    def drawn(self, params: nnx.State, frozen: nnx.State, key: jax.Array) -> nnx.State:
        """The parameters with what the model draws of them for a step; see `model.Model`."""
        model = self.merge(params, frozen)
        return self.split(model.draw(key))[1] if hasattr(model, "draw") else params

    def of_layers(self, state: nnx.State) -> tuple[Any, ...]:
        """For each kind its part of parameters or frozen variables; `nnx.State`s, maybe empty."""
        stack = state.get(LAYERS_OF_MODEL, {})
        return tuple(nnx.State(stack.get(kind, {})) for kind in self.kinds)

    def layer_functions(self) -> tuple[Callable[..., Any], ...]:
        """For each kind (params, frozen, carry, x, at) -> (carry, y)."""
        return tuple(_LayerFunction(kind, self._graphdef_of(kind)) for kind in self.kinds)

    @functools.cached_property
    def learned_starts(self) -> tuple[Callable[..., Any] | None, ...]:
        """For each kind (params, frozen, rows) -> its initial carry, if that depends on what is trained."""
        starts: list[Callable[..., Any] | None] = []
        for kind, *own in zip(
            self.kinds, self.of_layers(self.params), self.of_layers(self.frozen), strict=True
        ):
            graphdef = self._graphdef_of(kind)

            def start(params, frozen, rows, graphdef=graphdef):
                layer = nnx.merge(graphdef, params, frozen)
                return layer.initial_carry(rows) if hasattr(layer, "initial_carry") else ()

            params, frozen = _of_row(own)
            used = used_inputs(lambda *own, start=start: start(*own, 1), params, frozen)
            starts.append(start if any(used[: len(jax.tree.leaves(params))]) else None)
        return tuple(starts)

    def _graphdef_of(self, kind: str) -> Any:
        return nnx.graphdef(getattr(self.abstract_model().layers, kind))

    def abstract_model(self, sizes: Mapping[str, int] | None = None) -> Any:
        """The model of shapes, in its slots.

        Args:
          sizes: of the mesh's axes, to have it as a step that runs in units uses it (`prepare`).
        """

        def make(params, frozen):
            model = self.merge(params, frozen)
            return model.prepare(sizes) if sizes and hasattr(model, "prepare") else model

        return nnx.eval_shape(make, self.params, self.frozen)

    def carry_of(self, state: Any) -> tuple[Any, ...]:
        """The carry of a state, a dict of variables, as a tuple of trees of arrays, by kind."""
        return tuple(values(state[kind]) for kind in self.kinds)

    def initial_carry(self, params: nnx.State, frozen: nnx.State) -> dict[str, Any]:
        """The state of the layers at the start, as variables."""
        return self.merge(params, frozen).layers.initial_carry(self.batch_size)

    def layout_of(self, mesh: Mesh, *manual: str) -> Layout:
        """For activations (`At.layout`)."""
        return Layout(mesh, self.rules, manual)

    # ---- what is looked at ----

    def _choose_head(self, model: Any) -> str:
        asked, can = self.parallel.pipeline.head, hasattr(model, "last_part")
        if asked == "sharded" and not can and self.parallel.mesh.stage > 1:
            raise ValueError(
                f"head='sharded': model {type(model).__name__} has no method last_part, which runs the head "
                f"on every stage with its part of it; use head='last', or write one"
            )
        wanted = "sharded" if can else "last"
        return wanted if asked == "auto" or self.parallel.mesh.stage == 1 else asked

    def _place(self, plain: Any) -> Slots:
        """The slots of the placement that the pipeline asks for."""
        num_layers, stages = len(self.kind_of), self.parallel.mesh.stage
        if not num_layers:
            if stages > 1:
                raise ValueError(
                    f"stage={stages}: the model of task {self.task.name} has no layers in its stack to be "
                    f"placed on stages; use stage=1, and data and tensor for all devices"
                )
            return NO_SLOTS
        placement = self.placement_on(self.parallel, shares_head=self.head == "sharded")
        return make_slots(placement, self.parallel.num_groups, self.kind_of)

    def placement_on(self, parallel: Parallel, *, shares_head: bool) -> tuple[int, ...]:
        """Layers on each stage of any layout, as `placement`.

        Args:
          shares_head: what follows the layers is not the last stage's alone.
        Raises:
          ValueError: the placement that is asked for does not fit.
        """
        num_layers, stages = len(self.kind_of), parallel.mesh.stage
        if stages == 1 or not num_layers:
            return (num_layers,)
        costs = self.layer_costs
        return resolve_placement(
            parallel.pipeline.placement,
            num_layers,
            stages,
            parallel.num_groups,
            0.0 if shares_head else self.last_work,
            None if len(set(costs)) == 1 else costs,
        )

    @property
    def placement(self) -> tuple[int, ...]:
        """Layers on each stage; with several groups a stage, layers of each group, in the layers' order."""
        return self.slots.placement

    @functools.cached_property
    def layer_costs(self) -> tuple[float, ...]:
        """FLOPs of each layer's forward pass over a whole batch; 1 each if they have none."""
        by_kind = [count_flops(trace, *args) for trace, args in self._layer_traces]
        if not any(by_kind):
            return (1.0,) * len(self.kind_of)
        return tuple(by_kind[kind] for kind in self.kind_of)

    @functools.cached_property
    def last_cost(self) -> float:
        """Work of the last stage alone, in mean layers: what follows them, unless all stages share it."""
        if self.parallel.mesh.stage == 1 or self.head == "sharded":
            return 0.0
        return self.last_work

    @functools.cached_property
    def last_work(self) -> float:
        """Work of what follows the layers, in mean layers."""
        return count_flops(*self._last) / float(np.mean(self.layer_costs))

    @property
    def _last(self) -> tuple[Any, ...]:
        """What follows the layers, as a function, and its arguments over a whole batch."""
        model = self.plain

        def last(leaves, x, batch):
            return _with_leaves(model, leaves).last(x, batch, _At(self, batch))

        return last, jax.tree.leaves(nnx.state(model)), self.x, self._block

    @functools.cached_property
    def whole_kinds(self) -> tuple[str, ...]:
        """Kinds of layers whose gradients of weights cannot leave their backward pass; see `SplitLayer`."""
        own = zip(self.of_layers(self.params), self.of_layers(self.frozen), strict=True)
        whole = []
        for name, (params, frozen), function, (_, args) in zip(
            self.kinds, own, self.layer_functions(), self._layer_traces, strict=True
        ):
            params, frozen = _of_row((params, frozen))
            _, carry, x, batch = args
            at = _At(self, batch)
            if not SplitLayer(function, params, frozen, carry, x, at, splits=True).has_weights:
                whole.append(name)
        return tuple(whole)

    def _check_layers(self, plain: Any) -> None:
        """Traces `first`, every kind of layer and `last` once by itself, so that a mistake has a name."""
        self.plain = plain
        self._block = jax.eval_shape(self.to_block, self.batch)

        def first(model, batch):
            return model.first(batch, _At(self, batch))

        self.x = _traced("first", first, plain, self._block)
        _check_floats("what `first` gives", self.x)
        self._layer_traces = []
        for kind, name in enumerate(self.kinds):
            number = self.kind_of.index(kind)
            layer = nnx.eval_shape(lambda number=number: self._make(0).layers.layer(number))
            if getattr(layer, "whole_window", False) and self.parallel.num_chunks > 1:
                raise ValueError(
                    f"layer {name} reads the whole window at once, num_chunks={self.parallel.num_chunks} "
                    f"cuts it; use num_chunks=1, and more microbatches"
                )
            carry = ()
            if hasattr(layer, "initial_carry"):

                def begin(layer):
                    return layer.initial_carry(self.batch_size)

                carry = _traced(f"layer {name}", begin, layer)
                _check_floats(f"layer {name}: its initial_carry", carry)

            def call(layer, carry, x, batch, name=name):
                return _called(name, layer, carry, x, _At(self, batch))

            args = (carry, self.x, self._block)
            after, y = _traced(f"layer {name}", call, layer, *args)
            _check_same(f"layer {name}: its output", y, "its input", self.x)
            _check_same(
                f"layer {name}: the carry that it returns", after, "the one it takes", carry
            )
            graphdef, state = nnx.split(layer)

            def run(state, *args, graphdef=graphdef, call=call):
                return call(nnx.merge(graphdef, state), *args)

            self._layer_traces.append((run, (state, *args)))

        def last(model, x, batch):
            return checked_sums(model.last(x, batch, _At(self, batch)), model)

        self.num_sums = len(jax.tree.leaves(_traced("last", last, plain, self.x, self._block)))

    def to_block(self, batch: Any) -> Any:
        """A batch as the model sees it: time before rows."""
        if not self.time_major:
            return jax.tree.map(jnp.asarray, batch)
        return jax.tree.map(
            lambda a: a.swapaxes(0, 1) if jnp.ndim(a) > 1 else jnp.asarray(a), batch
        )

    # ---- what of the model a function before or after the layers uses ----

    def outer(self, model: Any) -> "Outer":
        """The variables of a model that are not its layers', and which of them `first` and `last` use.

        Args:
          model: this one, or what its `prepare` made of it; abstract or with values.
        """
        return Outer(self, model)


def rules_of(
    rules: Rules, parallel: Parallel, *, head_is_last: bool
) -> tuple[Rules, Rules, Rules, Rules]:
    """How parameters lie while a step computes; parameters, optimizer state and carry between steps.

    Args:
      rules: of the task.
      head_is_last: there are stages, and what follows the layers is on the last.
    """
    rules = off_stages(rules) if head_is_last else rules
    splits_update = parallel.fsdp or parallel.update != "replicated"
    return (
        rules,
        split_over_data(rules) if parallel.fsdp else rules,
        split_over_data(rules) if splits_update else rules,
        # Unequal shares do not split evenly: then every data-parallel group has all rows and takes its own.
        rules if parallel.has_equal_shares else rules.replace({BATCH: None}),
    )


class Outer:
    """Variables outside the stack, as flat lists that an engine can take; and the functions that use them.

    Attributes:
      first, last: numbers of the trained leaves that each uses; `first_frozen`, `last_frozen` likewise.
    """

    def __init__(self, layout: ModelLayout, model: Any):
        self.layout = layout
        self.graphdef, params, frozen = layout.split(model)
        self.paths, self.leaves, self._structure = _flatten(params)
        self.frozen_paths, self.frozen_leaves, self._frozen_structure = _flatten(frozen)
        shapes = [shape_of(leaf) for leaf in self.leaves]
        frozen_shapes = [shape_of(leaf) for leaf in self.frozen_leaves]
        block, x = layout._block, layout.x

        def uses(function: Callable[..., Any]) -> tuple[list[int], list[int]]:
            used = used_inputs(function, shapes, frozen_shapes)
            numbers = [n for n, path in enumerate(self.paths) if used[n] and not _is_layer(path)]
            rest = used[len(shapes) :]
            frozen = [
                n for n, path in enumerate(self.frozen_paths) if rest[n] and not _is_layer(path)
            ]
            return numbers, frozen

        def first(leaves, frozen):
            batch = zeros(block)
            return self.merge(leaves, frozen).first(batch, _At(layout, batch))

        def last(leaves, frozen):
            batch = zeros(block)
            model = self.merge(leaves, frozen)
            return checked_sums(model.last(zeros(x), batch, _At(layout, batch)), model)

        self.first, self.first_frozen = uses(first)
        self.last, self.last_frozen = uses(last)

    def merge(self, leaves: Sequence[Any], frozen: Sequence[Any]) -> Any:
        """The model of all its leaves, which may be shapes where they are not used."""
        return nnx.merge(
            self.graphdef,
            jax.tree.unflatten(self._structure, leaves),
            jax.tree.unflatten(self._frozen_structure, frozen),
        )

    def run_first(self, leaves: Any, frozen: Any, at: At) -> Any:
        """`first` of the model with the leaves that it uses."""
        at = at._replace(layer=len(self.layout.kind_of) + 1)
        return self._before(leaves, frozen).first(at.batch, at)

    def add_first_gradient(self, grads: Any, leaves: Any, frozen: Any, at: At, dx: Any) -> Any:
        """The gradients of these leaves, with what the model adds to them by itself."""
        state = jax.tree.unflatten(self._structure, _replaced(self.leaves, self.first, grads))
        flat = list(nnx.to_flat_state(state))
        own = nnx.from_flat_state([flat[number] for number in self.first])
        added = self._before(leaves, frozen).add_first_gradient(own, dx, at.batch, at)
        return tuple(jax.tree.leaves(added))

    def run_last(self, leaves: Any, frozen: Any, y: Any, at: At, *, is_part: bool) -> Any:
        """`last` of the model with the leaves that it uses; or `last_part`."""
        at = at._replace(layer=len(self.layout.kind_of))
        model = self.merge(
            _replaced(self.leaves, self.last, leaves),
            _replaced(self.frozen_leaves, self.last_frozen, frozen),
        )
        return checked_sums((model.last_part if is_part else model.last)(y, at.batch, at), model)

    def _before(self, leaves: Any, frozen: Any) -> Any:
        return self.merge(
            _replaced(self.leaves, self.first, leaves),
            _replaced(self.frozen_leaves, self.first_frozen, frozen),
        )


@functools.lru_cache(maxsize=256)
def lay_out(task: Task, parallel: Parallel) -> ModelLayout:
    """The layout of a task's model; the same object for equal arguments.

    Raises:
      ValueError: task and parallel do not fit each other, or the model is not one.
    """
    return ModelLayout(task, parallel)


def on_devices(
    task: Task, parallel: Parallel | MeshConfig | str | None = None, mesh: Mesh | None = None
) -> tuple[Parallel, Mesh]:
    """A layout whose sizes are all known, and its mesh.

    Where `data` is -1, all devices share the batch. If its rows do not divide by their number, as many of
    the first ones do as they divide by; not in several processes, nor where devices are named.

    Args:
      parallel: as for `init_state`; None is the task's own.
      mesh: None builds that of `parallel`.
    Raises:
      ValueError: there are other devices than the mesh needs; see `MeshConfig.build`.
    """
    parallel = Parallel.of(parallel, task.parallel)
    if mesh is None:
        parallel = _shared_by_rows(task, parallel)
        mesh = parallel.mesh.build()
    return (parallel.resolve(mesh.size) if -1 in parallel.mesh.sizes.values() else parallel), mesh


def with_sizes(task: Task) -> Task:
    """The task with the sizes that its data tell, whatever the devices."""
    return task.resolve()


def _shared_by_rows(task: Task, parallel: Parallel) -> Parallel:
    """With a `data` of -1 filled in, if it is for this process alone to choose."""
    config, num_microbatches = parallel.mesh, parallel.pipeline.num_microbatches
    if config.data != -1 or config.devices is not None or parallel.shares is not None:
        return parallel
    most = config.resolve().data
    if most == 1 or jax.process_count() > 1:
        return parallel
    rows, _ = _sizes_of(task, _example_of(with_sizes(task)), time_major=False)
    divide = (size for size in range(most, 0, -1) if rows % (size * num_microbatches) == 0)
    mesh = dataclasses.replace(config, data=next(divide, most))
    return dataclasses.replace(parallel, mesh=mesh)


class _LayerFunction:
    """A kind of layer as a function of its variables; mistakes inside are told with its name."""

    def __init__(self, name: str, graphdef: Any):
        self.name, self.graphdef = name, graphdef

    def __call__(self, params: Any, frozen: Any, carry: Any, x: Any, at: At) -> tuple[Any, Any]:
        return _called(self.name, nnx.merge(self.graphdef, params, frozen), carry, x, at)


def _called(name: str, layer: Any, carry: Any, x: Any, at: At) -> tuple[Any, Any]:
    """What a layer returns, if it is two things."""
    out = layer(carry, x, at)
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(
            f"layer {name} returns {in_words(out)}; let its __call__ return (carry, y), or wrap a module "
            f"that returns y alone: jaxpar.nn.Stateless(module)"
        )
    return out


def _At(layout: ModelLayout, batch: Any) -> At:
    """Of a whole batch, for tracing."""
    key = jax.random.key(0)
    zero = jnp.int32(0)
    return At(zero, zero, zero, key, batch, time_major=layout.time_major)


def _flatten(state: nnx.State) -> tuple[list[str], list[Any], Any]:
    pairs, structure = jax.tree.flatten_with_path(state)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
    return paths, [leaf for _, leaf in pairs], structure


def _is_layer(path: str) -> bool:
    return path.startswith(f"{LAYERS_OF_MODEL}/")


def _of_row(stacked: Any) -> Any:
    """Shapes of one layer's arrays, of those of a stack."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)


def _replaced(leaves: Sequence[Any], numbers: Sequence[int], values: Any) -> list[Any]:
    known = dict(zip(numbers, values, strict=True))
    return [known.get(n, shape_of(leaf)) for n, leaf in enumerate(leaves)]


def _with_leaves(model: Any, leaves: Sequence[Any]) -> Any:
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))


def _check_methods(task: Task) -> None:
    for name, *arguments in (("make_model", "rngs"), ("make_batches", "split", "seed")):
        use = f"write {name}({', '.join(('self', *arguments))})"
        check_takes(getattr(task, name), arguments, f"task {task.name}: {name}", use)


def _example_of(task: Task) -> Any:
    """The shapes of a batch, as users have it."""
    _check_methods(task)
    batch = task.example_batch()
    _check_numbers(task, batch)
    return jax.tree.map(shape_of, batch)


def _check_numbers(task: Task, batch: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(batch):
        dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        if getattr(dtype, "kind", None) in {*"OSUMm"}:  # objects, texts, dates
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} of task {task.name} is an array of {dtype}; give "
                f"numbers: classes and words as int32 ids"
            )


def _checked_model(task: Task, make: Callable[[], Any]) -> Any:
    """The model that a function makes, if it is one."""
    try:
        model = make()
    except ValueError as error:
        held = _HELD.match(str(error))
        if held is None:
            raise
        container, name, owner = held.groups()
        stack = "self.layers = jaxpar.Stack([make_layer] * num_layers, rngs=rngs)"
        use = stack if name == LAYERS_OF_MODEL else f"self.{name} = nnx.List(...), or nnx.Dict(...)"
        told = ValueError(
            f"task {task.name}: {owner}.{name} is a plain {container} of modules or arrays; write {use}"
            + f"; for the layers of a model {stack}" * (use != stack)
        )
        raise told.with_traceback(error.__traceback__) from None
    _check_model(task, model)
    return model


# How Flax begins a page about modules in a plain list: the list, its name, the class that has it.
_HELD = re.compile(
    r"Found data on value of type '<class '([\w.]+)'>' assigned to static attribute '(\w+)' "
    r"of Pytree type '<class '(?:[^']*\.)?(\w+)'>'"
)


def _check_model(task: Task, model: Any) -> None:
    for name, arguments in (("first", ("batch", "at")), ("last", ("y", "batch", "at"))):
        method = getattr(model, name, None)
        if not callable(method):
            raise ValueError(
                f"the model of task {task.name}, a {type(model).__name__}, has no method {name}; a model has "
                f"first(batch, at), layers (a Stack) and last(y, batch, at)"
            )
        check_takes(
            method,
            arguments,
            f"the model of task {task.name}, a {type(model).__name__}: {name}",
            f"write {name}({', '.join(('self', *arguments))})",
        )
    if not isinstance(getattr(model, LAYERS_OF_MODEL, None), Stack):
        raise ValueError(
            f"the model of task {task.name}, a {type(model).__name__}, has no Stack called layers; write "
            f"self.layers = jaxpar.Stack([make_layer] * num_layers, rngs=rngs)"
        )


def _sizes_of(task: Task, batch: Any, time_major: bool) -> tuple[int, int | None]:
    """Rows, and time steps, of a batch."""
    sized = [leaf for leaf in jax.tree.leaves(batch) if len(leaf.shape)]
    rows = {leaf.shape[0] for leaf in sized}
    if len(rows) != 1:
        raise ValueError(
            f"the arrays of a batch of task {task.name} have {sorted(rows) or 'no'} rows; each must have "
            f"the batch's rows as its first dim (only {STARTS!r} is a scalar)"
        )
    steps = {leaf.shape[1] for leaf in sized if len(leaf.shape) > 1 and leaf.shape[1] > 1}
    if not time_major:
        return rows.pop(), None
    return rows.pop(), max(steps, default=1)


def _traced(what: str, call: Callable[..., Any], module: Any, *args: Any) -> Any:
    """The shapes that `call(module, *args)` gives, of shapes; the module must keep its variables.

    Raises:
      ValueError: the call changes a variable of the module, or adds one.
    """
    graphdef, state = nnx.split(module)

    def run(state, *args):
        own = nnx.merge(graphdef, state)
        return call(own, *args), nnx.state(own)

    program, (out, after) = named(
        what, lambda: jax.make_jaxpr(run, return_shape=True)(state, *args)
    )
    jaxpr = program.jaxpr
    names, names_after = (_flatten(tree)[0] for tree in (state, after))
    before = dict(zip(names, jaxpr.invars[: len(names)], strict=True))
    given = jaxpr.outvars[len(jaxpr.outvars) - len(names_after) :]
    left = {name: handed_on(jaxpr, v) for name, v in zip(names_after, given, strict=True)}
    changed = [name for name in [*before, *left] if before.get(name) is not left.get(name)]
    if changed:
        name = changed[0].removesuffix("/value").replace("/", ".")
        raise ValueError(
            f"{what} changes its variable {name} when it is called, and that would be lost: it runs many "
            f"times in a step, in an order that the schedule decides; keep what lasts from step to step in "
            f"the carry of a layer, and return what is to be looked at in the metrics of `last`"
        )
    return out


def named(what: str, trace: Callable[[], Any]) -> Any:
    """What a trace gives; its errors get a note with a name."""
    try:
        return trace()
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            f"{what} uses a collective of its own ({error}); the engine alone exchanges along "
            f"{DATA!r} and {STAGE!r}, and the compiler along the axes of the rules: leave it out"
        ) from error
    except Exception as error:
        error.add_note(f"in {what} of the model, traced by itself")
        raise


def _check_floats(what: str, tree: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{what}{_place(path)} is {leaf.dtype}{list(leaf.shape)}; it must be of floating-point "
                f"numbers; anything else belongs in the batch, which every layer sees (at.batch)"
            )


def _check_same(what: str, found: Any, as_what: str, wanted: Any) -> None:
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        raise ValueError(
            f"{what} has the structure {jax.tree.structure(found)}, {as_what} "
            f"{jax.tree.structure(wanted)}; they must be the same"
        )
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"{what}{_place(path)} is {a.dtype}{list(a.shape)}, {as_what} {b.dtype}{list(b.shape)}; "
                f"they must be the same, since layers of a stack pass the same arrays on"
            )


def _place(path: Any) -> str:
    text = jax.tree_util.keystr(path)
    return f" ({text})" if text else ""
