"""A task's model of shapes: its parts are traced once each, so that a mistake is reported with a name."""

import functools
import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import LayerContext, Processor, anywhere
from jaxpar.base.axes import MESH_AXES
from jaxpar.base.checks import check_names, check_takes, require
from jaxpar.base.display import format_names
from jaxpar.base.jax_settings import check_settings_of_jax
from jaxpar.base.keys import new_key
from jaxpar.base.padding import Padding
from jaxpar.base.parts import STARTS, check_keys, check_metrics, check_parts, part_of
from jaxpar.base.trees import (
    check_floats,
    check_same,
    has_time,
    shape_of,
    time_steps,
    uneven,
    whole_bytes,
)
from jaxpar.base.types import Activations, Arrays, Batch, Function, Module, Params, Shapes
from jaxpar.data.batches import check_numbers, check_types, owned
from jaxpar.data.order import DrawnBatches
from jaxpar.model.abstract import abstract
from jaxpar.model.adopt.adopted import adopted
from jaxpar.model.adopt.cut_model import CutModel
from jaxpar.model.adopt.variables import is_frozen
from jaxpar.model.model import (
    Layer,
    Model,
    Sums,
    check_variables,
    checked_outputs,
    checked_sums,
    describe_value,
    overrides,
    run_layer,
)
from jaxpar.model.outer import STACK
from jaxpar.model.row_streams import as_run
from jaxpar.model.stack import Stack, check_rows_of_carry
from jaxpar.model.task import Task
from jaxpar.model.tracing import flatten, made, module_of, program_of, shapes_and_program, shapes_of
from jaxpar.sharding import named_leaves, user_name
from jaxpar.trace.bound import in_bound
from jaxpar.trace.counts import used_inputs
from jaxpar.trace.jaxprs import equations_for, reads_of
from jaxpar.trace.source_lines import source_line_of_error

_log = logging.getLogger(__name__)

# In errors of JAX and NumPy that are about shapes.
_OF_SHAPES = re.compile(r"shape|dimension|broadcast|Size of label|subscript|divisible")
WHY_SAME = ", or give layers that are meant to differ a kind_name each"
WHY_FLOATS = ", and put anything else into the batch, which layers see as at.batch"


class _Traces(NamedTuple):
    """What tracing the parts of a model tells.

    Attributes:
      x: shapes of what `first` gives, of a whole batch; `y` of what the last layer gives.
      padding: makes blocks of one shape of what goes from layer to layer.
      layers: of each kind, (state, carry, x, batch) -> (carry, y) or (carry, y, sums), and these arguments.
      sums: shapes of those of a batch: of `last`, and what layers add to them.
      adds_sums: whether layers do.
    """

    x: Activations
    y: Activations
    padding: Padding
    layers: list[tuple[Function, Shapes]]
    sums: Sums
    adds_sums: bool


def own_axes(facts: "TracedModel") -> tuple[str, ...]:
    """The axes that a task adds to the mesh."""
    return facts.task.axes


class TracedModel:
    """A task's model of shapes, whose parts are traced once each.

    Attributes:
      task: whose model it is, resolved.
      platform: that computes, which layers may ask (`LayerContext.on_cpu`).
      batch: `ShapeDtypeStruct`s of a batch, as users have it; `batch_size` its rows, `num_steps` its time
        steps (None if the model has no time, or arrays of several lengths).
      time_major: of the model.
      model: of shapes, as the task makes it, its layers not yet in their slots.
      kinds: names of the kinds of layers; `kind_of` the number of each layer's kind; `unroll` of the stack.
      block: shapes of a batch as the model sees it.
      looked_at: as the method; each answer is found once.
      is_told: whether `warn_of_resets` has been called.
      checked: what was found to be right of the model, by `rows` and `custom_backward`.
    """

    def __init__(self, task: Task, platform: str):
        """Looks at the shapes of a batch and of the model; its parts are traced when they are asked for.

        Raises:
          ValueError: the task's batches or its model are not as they must be.
        """
        self.task, self.platform = task, platform
        task.rules.check_axes(f"axes of task {task.name}", (*MESH_AXES, *task.axes))
        self.batch = jax.tree.map(shape_of, _example_of(task))
        self.cut_model = CutModel.of(task, self.batch) if task.adopts else None
        if self.cut_model is None:
            self.model = module_of(f"the model of task {task.name}, a", self.make)[0]
        else:
            self.model = abstract(lambda: self.make(0))
        _check_model(task, self.model)
        check_variables(f"the model of task {task.name}", nnx.state(self.model))
        _check_frozen(task, self.model)
        _check_trained(task, self.params)
        self.time_major = bool(getattr(self.model, "time_major", True))
        self.batch_size, steps = _rows_of(task, self.batch), time_steps(self.batch, 1).values()
        is_one = self.time_major and len({*steps}) < 2
        self.num_steps = next(iter(steps), 1) if is_one else None
        stack = self.model.layers
        self.kinds, self.kind_of, self.unroll = stack.kinds, stack.kind_of, stack.unroll
        self.block = jax.eval_shape(self.to_block, self.batch)
        self.looked_at = functools.cache(self._looked_at)
        self.checked = set[tuple[Any, ...]]()
        self.is_told = False

    @classmethod
    def of(cls, task: Task, platform: str | None = None) -> Self:
        """The facts of a task, traced now: an equal task may read something that has changed since.

        Args:
          platform: None is that of JAX's default devices.
        Raises:
          ValueError: as of the constructor; or a setting of JAX forbids it.
        """
        check_settings_of_jax()
        return cls(task, platform or jax.default_backend())

    def make(self, seed: int | jax.Array) -> Module:
        """The model with its values, of a seed or a key, its layers not in slots yet. Call under `jit`."""
        if self.cut_model is not None:
            return adopted(self.cut_model, seed)
        model = made(self.task.make_model, seed)
        return as_run(model, ("first", "last", "predict", "last_part", "predict_part"))

    def split(self, model: Module) -> tuple[Any, nnx.State, nnx.State]:
        """Structure, what is trained, and all other variables of a model."""
        frozen = self.task.frozen if self.cut_model is None else is_frozen
        trained = nnx.All(nnx.Param, nnx.Not(frozen))
        graphdef, params, frozen = nnx.split(model, trained, ...)
        return graphdef, params, frozen

    @property
    def params(self) -> nnx.State:
        """Shapes of what is trained, all layers of a kind in one stack."""
        return self.split(self.model)[1]

    @property
    def ends(self) -> tuple[str, str]:
        """What comes before the layers and what follows them, in words."""
        is_own = self.cut_model is None
        return ("`first`", "`last`") if is_own else ("what comes before the blocks", "the loss")

    @property
    def model_size(self) -> tuple[int, int]:
        """How many numbers the model's variables have, each layer's once, and their bytes."""
        _, *variables = self.split(self.model)
        numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables))
        return numbers, whole_bytes(variables)

    def to_block(self, batch: Batch) -> Batch:
        """A batch as the model sees it: time before rows."""

        def to_block(a, timed):
            return a.swapaxes(0, 1) if self.time_major and timed else jnp.asarray(a)

        return jax.tree.map(to_block, batch, has_time(batch))

    def at(self, batch: Batch, *, draws: bool = True) -> LayerContext:
        """Of a whole batch, for tracing; with a key as in training, or without one."""
        zero, key = jnp.int32(0), new_key(0) if draws else None
        return LayerContext(
            zero,
            zero,
            zero,
            key,
            batch,
            time_major=self.time_major,
            processor=Processor(self.platform),
        )

    @functools.cached_property
    def graphdef(self) -> Any:
        """The structure of the model."""
        return nnx.graphdef(self.model)

    def first(self, params: Params, frozen: Params, block: Batch, **draws: bool) -> Activations:
        """`first` as a function of the model's variables."""
        return nnx.merge(self.graphdef, params, frozen).first(block, self.at(block, **draws))

    def last(self, params: Params, frozen: Params, y: Arrays, block: Batch, **draws: bool) -> Sums:
        """`last` likewise.

        Raises:
          ValueError: it does not return `Sums`.
        """
        sums = nnx.merge(self.graphdef, params, frozen).last(y, block, self.at(block, **draws))
        return checked_sums(sums, f"{self.ends[1]} of {type(self.model).__name__}")

    @property
    def has_last_part(self) -> bool:
        """Whether the model itself says how all stages have a part of what follows the layers."""
        return overrides(self.model, "last_part")

    @functools.cached_property
    def layer_stacks(self) -> tuple[tuple[nnx.State, ...], ...]:
        """Trained and other variables of the layers by kind, of shapes, all layers of a kind in one stack."""
        stacks = [state.get(STACK, {}) for state in self.split(self.model)[1:]]
        return tuple(tuple(nnx.State(own.get(kind, {})) for kind in self.kinds) for own in stacks)

    @functools.cached_property
    def outer_variables(self) -> tuple[dict[str, Params], ...]:
        """Trained and other variables outside of the layers, of shapes, by name."""
        begin, states = f"{STACK}/", self.split(self.model)[1:]
        named = (sorted(named_leaves(state, "/")) for state in states)
        return tuple({n: leaf for n, leaf in own if not n.startswith(begin)} for own in named)

    @functools.cached_property
    def starts_with_variables(self) -> bool:
        """Whether what layers carry at the start depends on variables of theirs."""
        graphdef, state = nnx.split(self.model.layers)
        return any(used_inputs(lambda own: nnx.merge(graphdef, own).initial_carry(1), state))

    def _looked_at(self, name: str, sizes: tuple[tuple[str, int], ...] | None) -> frozenset[str]:
        """The variables that `draw` of the model, or `prepare` for a mesh of sizes, changes or depends on."""
        graphdef, *states = self.split(self.model)
        paths, leaves, structure = flatten(nnx.State({str(n): own for n, own in enumerate(states)}))
        paths = [path.partition("/")[2].removesuffix("/value") for path in paths]

        def run(leaves):
            model = nnx.merge(graphdef, *jax.tree.unflatten(structure, leaves).values())
            argument = new_key(0) if sizes is None else dict(sizes)
            return jax.tree.leaves(self.split(getattr(model, name)(argument))[1:])

        jaxpr = jax.make_jaxpr(run)(leaves).jaxpr
        if len(jaxpr.outvars) != len(leaves):
            return frozenset(paths)
        pairs = zip(jaxpr.invars, jaxpr.outvars, strict=True)
        changed = [n for n, (before, after) in enumerate(pairs) if before is not after]
        used = used_inputs(lambda own: [run(own)[n] for n in changed], leaves)
        return frozenset(path for n, path in enumerate(paths) if n in changed or used[n])

    def check_prepare(self, sizes: Mapping[str, int]) -> None:
        """Raises a ValueError if `prepare` makes what is not trained of what is: gradients would be lost."""
        graphdef, params, others = self.split(self.model)
        paths, leaves, structure = flatten(params)

        def run(leaves, others):
            params = jax.tree.unflatten(structure, leaves)
            return self.split(nnx.merge(graphdef, params, others).prepare(sizes))[2]

        jaxpr = jax.make_jaxpr(run)(leaves, others).jaxpr
        reads = reads_of(equations_for(jaxpr.eqns, jaxpr.outvars), jaxpr.outvars)
        trained = zip(paths, jaxpr.invars[: len(paths)], strict=True)
        names = [path.removesuffix("/value").replace("/", ".") for path, v in trained if v in reads]
        require(
            not names,
            f"`prepare` of {type(self.model).__name__} makes a variable that is not trained of "
            f"{format_names(names)}, whose gradient would be lost.\nFix: make it an nnx.Param.",
        )

    @functools.cached_property
    def passed(self) -> Shapes:
        """Shapes of what goes from stage to stage, of a whole batch."""
        return jax.eval_shape(lambda x: self.traces.padding.pad(x, anywhere), self.traces.x)

    @functools.cached_property
    def whole_window(self) -> tuple[str, ...]:
        """Kinds of layers that read a whole window at once."""
        pairs = zip(self.kinds, self.first_layers, strict=True)
        return tuple(name for name, layer in pairs if getattr(layer, "whole_window", False))

    @functools.cached_property
    def why_whole(self) -> str:
        """Why time cannot be cut, into chunks or over axes, as far as shapes tell; "" if it can."""
        if self.cut_model is not None and self.cut_model.why_whole:
            return f"in the model {self.cut_model.name} {self.cut_model.why_whole}"
        if not self.time_major:
            return "the model has no time dim (time_major = False)"
        steps = {leaf.shape[0] for leaf in jax.tree.leaves(self.traces.x) if leaf.ndim}
        if self.num_steps is None or self.num_steps in steps:
            return uneven(self.batch)
        return f"`first` returns {' and '.join(map(str, sorted(steps)))} time steps for {self.num_steps}"

    @functools.cached_property
    def rows_together(self) -> dict[str, int]:
        """How many rows a layer mixes, of the kinds that do."""
        pairs = zip(self.kinds, self.first_layers, strict=True)
        sizes = {name: getattr(layer, "rows_together", None) for name, layer in pairs}
        return {name: size for name, size in sizes.items() if size is not None}

    @functools.cached_property
    def first_layers(self) -> list[Module]:
        """The first layer of each kind, of shapes."""
        stack = self.model.layers
        numbers = [self.kind_of.index(kind) for kind in range(len(self.kinds))]
        return [abstract(lambda stack, n=n: stack.layer(n), stack) for n in numbers]

    @functools.cached_property
    @in_bound(own_axes)
    def traces(self) -> _Traces:
        """`first`, every kind of layer and `last`, each traced once by itself, so that a mistake has a name.

        Raises:
          ValueError: one of them is not as it must be.
        """

        def first(model, batch, **draws):
            return model.first(batch, self.at(batch, **draws))

        x = shapes_of("first", first, self.model, self.block)
        check_floats("what `first` gives", x, WHY_FLOATS)
        if self.cut_model is None:
            _check_first(self, x)
        shapes, layers, of_layers = [x], list[Any](), list[Any]()
        for number, kind in enumerate(self.kind_of):
            if kind == len(layers):  # kinds are numbered in the order of their first layers
                run, args, y, sums = self._trace_layer(kind, shapes[-1])
                layers.append((run, args, y))
                of_layers.append(sums)
            same = f"the input of layer {number} ({self.kinds[kind]})"
            first_of_kind = f"that of layer {self.kind_of.index(kind)}"
            check_same(same, shapes[-1], first_of_kind, layers[kind][1][2], WHY_SAME)
            shapes.append(layers[kind][2])
        own = [leaf.shape[0] for leaf in jax.tree.leaves(x) if leaf.ndim]
        steps = self.num_steps if self.num_steps in own else next(iter(own), 1)
        dims = ("time", steps or 1), ("rows", self.batch_size)
        padding = Padding(shapes, dict(dims[not self.time_major :]))

        def last(model, y, batch, **draws):
            sums = model.last(y, batch, self.at(batch, **draws))
            return checked_sums(sums, f"{self.ends[1]} of {type(model).__name__}")

        sums = shapes_of("last", last, self.model, shapes[-1], self.block)
        if overrides(self.model, "draw"):
            graphdef, state = nnx.split(self.model)
            key = new_key(0)
            program_of("draw", lambda own: nnx.state(nnx.merge(graphdef, own).draw(key)), state)
        for own in filter(None, of_layers):
            new = {name: shape for name, shape in own.metrics.items() if name not in sums.metrics}
            sums = sums._replace(metrics={**sums.metrics, **new})
        what = f"the model of task {self.task.name}"
        check_metrics(sums.metrics, self.task.unit, what)
        return _Traces(x, shapes[-1], padding, [each[:2] for each in layers], sums, any(of_layers))

    def warn_of_resets(self) -> None:
        """Warns, once, if the user's batches have no `starts`, so that the state is reset before each."""
        if self.is_told or not self.time_major or part_of(self.batch, STARTS) is not None:
            return
        self.is_told = True
        pairs = zip(self.kinds, self.traces.layers, strict=True)
        kinds = [name for name, (_, (_, carry, *_)) in pairs if jax.tree.leaves(carry)]
        # Where jaxpar's own say nothing, each row is a whole sequence.
        is_own = kinds and not isinstance(self.task.make_batches("train", 0), DrawnBatches)
        if is_own and jax.process_index() == 0:
            _log.warning(
                "batches of task %s have no %r, so the state of layer %s is reset before each batch. Fix: "
                "add a scalar %r to each batch: False if its rows continue the batch before, else True",
                *(self.task.name, STARTS, kinds[0], STARTS),
            )

    @property
    def parts(self) -> dict[str, tuple[Function, Shapes]]:
        """`first`, a layer of each kind and `last` as functions, and shapes of their arguments."""
        _, *states = self.split(self.model)
        layers = zip(self.kinds, self.traces.layers, strict=True)
        return {
            "`first`": (self.first, (*states, self.block)),
            **{f"layer {name}": each for name, each in layers},
            "`last`": (self.last, (*states, self.traces.y, self.block)),
        }

    @functools.cached_property
    @in_bound(own_axes)
    def outputs(self) -> dict[str, Shapes]:
        """Shapes of what `predict` gives of a batch, as the model sees it: [T, B, ...], or [B, ...].

        Raises:
          ValueError: the model has no such method, or it returns something else.
        """
        name = type(self.model).__name__
        by_task = (
            "write predict(self, model, batch) in the task; return an array, or arrays by name."
        )
        require(
            self.cut_model is None or self.cut_model.predicts,
            f"nothing is predicted: the loss of task {self.task.name} does not call the model {name} itself, "
            f"or needs less of the blocks than the model returns.\nFix: {by_task}",
        )
        if not overrides(self.model, "predict"):
            raise ValueError(
                f"model {name} has no method predict.\n"
                f'Fix: write predict(self, y, batch, at) that returns arrays by name: {{"y": self.out(y)}}.'
            )
        _check_method(f"model {name}", self.model, "predict", "y", "batch", "at")

        def predict(model, y, batch, **draws):
            out = model.predict(y, batch, self.at(batch, **draws))
            for own in out.values() if self.cut_model else ():
                require(
                    isinstance(own, jax.Array),
                    f"the prediction of model {name} contains {describe_value(own)}.\nFix: {by_task}",
                )
            return checked_outputs(out, name)

        found = shapes_of("predict", predict, self.model, self.traces.y, self.block)
        for key, output in found.items():
            if output.shape[self.time_major :][:1] != (self.batch_size,):
                dims = "[time, rows, ...]" if self.time_major else "[rows, ...]"
                raise ValueError(
                    f"`predict` of {name} returns an array of shape {list(output.shape)} as {key!r} for "
                    f"{self.batch_size} rows.\nFix: return arrays {dims}."
                )
        return found

    def _trace_layer(self, kind: int, x: Activations) -> tuple[Any, ...]:
        """As a function, with shapes of the arguments; and the shapes of y, and of the sums, or ()."""
        layer, name, carry = self.first_layers[kind], self.kinds[kind], ()
        check_names(f"layer {name}", layer, Layer)
        if hasattr(layer, "initial_carry"):

            def begin(layer):
                return layer.initial_carry(self.batch_size)

            carry, _ = shapes_and_program(f"layer {name}", begin, layer)
            check_floats(f"layer {name}: its initial_carry", carry, WHY_FLOATS)
            twice = 2 * self.batch_size  # a number that it may be fixed to is the batch's
            more = abstract(lambda layer: layer.initial_carry(twice), layer)
            check_rows_of_carry(name, more, twice)

        def call(layer, carry, x, batch, **draws):
            return run_layer(name, layer, carry, x, self.at(batch, **draws))

        try:
            after, y, *sums = shapes_of(f"layer {name}", call, layer, carry, x, self.block)
        except (TypeError, ValueError) as error:
            if not _OF_SHAPES.search(str(error)) or "Fix: " in str(error):
                raise
            shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(x))
            line, said = source_line_of_error(error), str(error).partition("\n")[0]
            fact = f"layer {name} does not take its input, {shapes}: {said} ({line})"
            fix = "let `first`, or the layer before, return what it takes, such as by nnx.Linear"
            raise ValueError(f"{fact}\nFix: {fix}.").with_traceback(error.__traceback__) from None
        check_floats(f"layer {name}: its output", y, WHY_FLOATS)
        check_same(f"layer {name}: the carry that it returns", after, "the one it takes", carry)
        graphdef, state = nnx.split(layer)

        def run(state, *args):
            return call(nnx.merge(graphdef, state), *args)

        return run, (state, carry, x, self.block), y, sums[0] if sums else ()


def _check_method(what: str, owner: Module, name: str, *arguments: str) -> None:
    use = f"write {name}({', '.join(('self', *arguments))})"
    check_takes(getattr(owner, name), arguments, f"{what}: {name}", use)


def _check_first(facts: TracedModel, x: Activations) -> None:
    """Raises a ValueError if nothing that `first` returned has the rows of the batch where they must be."""
    rows, place = facts.batch_size, int(facts.time_major)
    shapes = [leaf.shape for leaf in jax.tree.leaves(x)]
    if not any(shape[place : place + 1] == (rows,) for shape in shapes):
        dims = "[time, rows, ...]" if facts.time_major else "[rows, ...]"
        found = f"an array {[*shapes[0]]}" if shapes else "nothing"
        raise ValueError(
            f"`first` of {type(facts.model).__name__} returns {found} for a batch of {rows} rows.\n"
            f"Fix: return x, {dims}, as the arrays of the batch come."
        )


def _example_of(task: Task) -> Batch:
    """A batch, as users have it."""
    _check_method(f"task {task.name}", task, "make_model", "rngs")
    _check_method(f"task {task.name}", task, "make_batches", "split", "seed")
    check_names(f"task {task.name}", task, Task)
    batch = task.example_batch()
    check_keys(batch, f"the batch of task {task.name}")
    check_types(batch, f"of task {task.name}")
    batch = owned(batch)
    check_numbers(batch)
    check_parts(batch, f"of task {task.name}")
    return batch


def _check_model(task: Task, model: Module) -> None:
    what = f"the model of task {task.name}, a {type(model).__name__}"
    check_names(what, model, Model)
    for name, *arguments in (("first", "batch", "at"), ("last", "y", "batch", "at")):
        if not overrides(model, name):
            raise ValueError(
                f"{what}, has no method {name}.\n"
                f"Fix: write first(batch, at), layers (a Stack) and last(y, batch, at)."
            )
        _check_method(what, model, name, *arguments)
    if not isinstance(getattr(model, STACK, None), Stack):
        raise ValueError(
            f"{what}, has no Stack called layers.\n"
            f"Fix: write self.layers = jaxpar.Stack([make_layer] * num_layers, rngs=rngs)."
        )


def _check_frozen(task: Task, model: Module) -> None:
    """Raises if the task's filter of what is not trained matches nothing of the model."""
    if isinstance(nnx.filterlib.to_predicate(task.frozen), nnx.Nothing):
        return
    names = [user_name(*named) for named in named_leaves(nnx.state(model, nnx.Param))]
    frozen = is_frozen if task.adopts else task.frozen
    if not nnx.to_flat_state(nnx.state(model, nnx.All(nnx.Param, frozen))):
        raise ValueError(
            f"frozen={task.frozen} of task {task.name} matches no parameter of {format_names(names)}.\n"
            f"Fix: give a filter of some, such as nnx.PathContains({names[0].partition('.')[0]!r})."
        )


def _check_trained(task: Task, params: nnx.State) -> None:
    """Raises if something that is trained has no gradient, going by its type."""
    for name, leaf in named_leaves(params):
        require(
            jnp.issubdtype(leaf.dtype, jnp.inexact),
            f"parameter {user_name(name, leaf)} of task {task.name} is {leaf.dtype}, which has no "
            f"gradient.\nFix: make it an nnx.Variable, or name it in Task.frozen.",
        )


def _rows_of(task: Task, batch: Batch) -> int:
    """Rows of a batch."""
    sized = [leaf for leaf in jax.tree.leaves(batch) if len(leaf.shape)]
    rows = {leaf.shape[0] for leaf in sized}
    if len(rows) != 1:
        raise ValueError(
            f"the arrays of a batch of task {task.name} have {sorted(rows) or 'no'} rows.\n"
            f"Fix: make the rows of the batch the first dim of each array; only {STARTS!r} is a scalar."
        )
    return rows.pop()
