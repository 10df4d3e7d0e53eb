"""A model: what comes before the layers, a stack of layers, what comes after them.

    batch --first--> x --layer 0--> x --layer 1--> ... --last--> sums of loss, weight and metrics

A *layer* is a module `(carry, x, at) -> (carry, y)`: its state, its inputs, where they lie (`At`). See
`Layer` and `Model` for what each may say besides.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr

from jaxpar.base.at import At
from jaxpar.base.axes import BATCH, LAYERS
from jaxpar.base.checks import check_takes, require, require_instance
from jaxpar.base.keys import is_key, new_key, same_under_vmap
from jaxpar.pipeline.placement import Slots, make_slots
from jaxpar.sharding import is_variable, named_leaves
from jaxpar.trace.again import difference, same_value
from jaxpar.trace.counts import FACTORIZATIONS
from jaxpar.trace.jaxprs import equations_in

KIND = "kind"  # metadata of a stacked variable: the kind of layer that it is of

# Variables that a call changes: a layer is run many times, in an order that the schedule decides.
_CHANGING = (nnx.RngState, nnx.BatchStat, nnx.Cache, nnx.Intermediate)


class Sums(NamedTuple):
    """Sums over a block, to be added over blocks: the loss of a step is `loss / weight`.

    Attributes:
      loss: float32 scalar, what is differentiated.
      weight: how much the block counts, such as its number of targets; float32 scalar. Compute it from the
        batch alone where you can: then its total is known before the backward pass.
      metrics: further sums by name; what is reported is `metrics / weight`. Names of other numbers of a run
        (`base.parts.NUMBERS`) are taken.
    """

    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array] = {}  # noqa: RUF012 - never changed

    @property
    def by_name(self) -> dict[str, Any]:
        """All of them."""
        return {"loss": self.loss, "weight": self.weight, **self.metrics}

    def with_names(self, names: Iterable[str]) -> "Sums":
        """With metrics of these names, 0 where there was none."""
        nothing = {name: jnp.zeros((), jnp.float32) for name in names}
        return self._replace(metrics={**nothing, **self.metrics})


def mean_loss(sums: Sums) -> jax.Array:
    """The loss of a step; where nothing counts, the sum."""
    return sums.loss / jnp.where(sums.weight == 0, 1.0, sums.weight)


def checked_sums(sums: Any, what: str) -> Sums:
    """What `last` of a model, or a layer, returned as sums, all of them as float32.

    Raises:
      ValueError: it is not a `Sums`, or has something that is not a single real number.
    """
    if not isinstance(sums, Sums) or not isinstance(sums.metrics, Mapping):
        raise ValueError(
            f"{what} returns {in_words(sums)}.\nFix: return jaxpar.Sums(loss, weight, metrics), of sums over "
            f"the block, not means."
        )
    for key, number in sums.by_name.items():
        if not isinstance(number, float | int | np.generic | jax.Array) or jnp.ndim(number):
            raise ValueError(
                f"{what} returns {in_words(number)} as {key!r} of its Sums.\nFix: use jnp.sum({key})."
            )
        require(
            not jnp.iscomplexobj(number),
            f"{what} returns {jnp.result_type(number)} as {key!r} of its Sums.\n"
            f"Fix: use jnp.real({key}), or jnp.abs({key}).",
        )

    # Sums of fewer digits would not count far: of bfloat16, ones add up to 256.
    return jax.tree.map(lambda number: jnp.asarray(number).astype(jnp.float32), sums)


def in_words(value: Any) -> str:
    """What a function of the user's returned: "a list", "an array of shape [3]", "nothing"."""
    if isinstance(value, np.ndarray | jax.Array):
        return f"an array of shape {list(value.shape)}"
    if isinstance(value, Sums):
        return f"a Sums whose metrics are a {type(value.metrics).__name__}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def check_variables(what: str, state: nnx.State) -> None:
    """Raises a ValueError for variables that calls change, going by their type, such as `nnx.BatchStat`."""
    for path, leaf in nnx.to_flat_state(state):
        if isinstance(leaf, _CHANGING):
            raise ValueError(
                f"{what} has {'.'.join(map(str, path))}, a {type(leaf).__name__}, which its calls change.\n"
                f"Fix: use jaxpar.nn.dropout(x, rate, at), or a norm over features, such as nnx.LayerNorm."
            )


class Layer(nnx.Module):
    """A part of a `Stack`. Derive from it, or have what you need of it in any `nnx.Module`.

    Attributes:
      kind_name: layers of one name, structure and shapes are one kind, whose parameters are stacked under it;
        None is the name of the class.
      carry_dims: names of the dims of each array of the carry, a tree as that, such as ("batch", "hidden"),
        so that rules can split it; None names the rows alone.
      whole_window: whether it reads all time steps at once, as attention does: chunks of time are refused.
      rows_together: how many neighbouring rows of the batch it may mix, as a norm by their statistics does:
        it is called for so many at a time, whatever the mesh and the microbatches. None: each row stands
        alone, and calls have any number of them.
    """

    kind_name: ClassVar[str | None] = None
    carry_dims: ClassVar[Any] = None
    whole_window: ClassVar[bool] = False
    rows_together: ClassVar[int | None] = None

    def initial_carry(self, rows: int) -> Any:
        """The state that a sequence begins with: a tree of float arrays [rows, ...]; () for none."""
        return ()

    def __call__(self, carry: Any, x: Any, at: At) -> tuple[Any, ...]:
        """The layer over a block of time: (carry, y), or (carry, y, sums) if it adds to the loss.

        Args:
          carry: the state before the block, as `initial_carry`.
          x: a tree of float arrays, [time, rows, ...], or without time [rows, ...].
          at: where the block lies; `at.batch` is its part of the batch, whatever the layer.
        Returns:
          the state after the block, and y, which the next layer takes; maybe a `Sums` over the block's rows,
          of weight 0, which is added to those of `last`.
        """
        raise NotImplementedError


class Model(nnx.Module):
    """What a model is. Derive from it, or have what you need of this in any `nnx.Module`.

    Attributes:
      layers: a `Stack`.
      time_major: blocks come as [time, rows, ...] (arrays [rows] of a batch as they are), and time can be cut
        into chunks. False is for a model without time: blocks come as [rows, ...].
    """

    time_major: ClassVar[bool] = True
    layers: "Stack"

    def first(self, batch: Any, at: At) -> Any:
        """Before the layers: a block of the batch -> x, a tree of float arrays."""
        raise NotImplementedError

    def last(self, y: Any, batch: Any, at: At) -> Sums:
        """After the layers: sums over the block."""
        raise NotImplementedError

    def predict(self, y: Any, batch: Any, at: At) -> dict[str, jax.Array]:
        """Optional: what is predicted for each row, by name; for `LoadedRun.predict`.

        Returns:
          arrays [time, rows, ...], or [rows, ...] without time.
        """
        raise NotImplementedError

    def draw(self, key: jax.Array) -> "Model":
        """Optional: the model with what is drawn once a step, of its parameters alone: dropped weights, say.

        Args:
          key: of the step; it is not called in evaluation.
        """
        raise NotImplementedError

    def prepare(self, sizes: Mapping[str, int]) -> "Model":
        """Optional: the model as a step that runs in units uses it.

        For work on its parameters that is needed once a step, not once a unit.

        Args:
          sizes: of the mesh's axes.
        """
        raise NotImplementedError

    def last_part(self, y: Any, batch: Any, at: At) -> Sums:
        """Optional: `last` on every stage of a pipeline at once (head="sharded").

        Each stage has its part of the parameters whose dims the rules map to `stage`, and combines what the
        parts give by collectives over `stage`. Without it, what `last` calls can be in parts (`ends`).

        Args:
          y: all of it, in float32.
        """
        raise NotImplementedError

    def predict_part(self, y: Any, batch: Any, at: At) -> dict[str, jax.Array]:
        """Optional: `predict` on every stage at once, as `last_part`; all give the same.

        Without it the last stage has the whole parameters of `predict` while it runs.
        """
        raise NotImplementedError


def says(model: Any, name: str) -> bool:
    """Whether a model has an optional method: not that of `Model`."""
    method = getattr(model, name, None)
    return method is not None and getattr(method, "__func__", None) is not getattr(Model, name)


class _Source:
    """How to draw the layers again, in other slots; no part of what the stack is."""

    def __init__(self, makers: Sequence[Callable[[nnx.Rngs], Any]], key: jax.Array):
        self.makers, self.key = makers, key
        self.looks = {id(maker): _look_at(maker) for maker in {id(m): m for m in makers}.values()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Source)

    def __hash__(self) -> int:
        return 0


class Stack(nnx.Module):
    """Layers, one after the other; those of equal structure share stacked parameters.

    Each *kind* of layer is stored under the name of its class in lower case (or its attribute `kind_name`),
    as a module whose variables have a leading dim `layers`: `stack.gru.w_x` is [layers, ...].

    Attributes:
      kinds: their names, in the order in which they first occur.
      kind_of: the number of each layer's kind.
      slots: where each layer lies; see `place`.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[nnx.Rngs], nnx.Module]],
        *,
        rngs: nnx.Rngs,
        unroll: int = 4,
    ):
        """Draws the layers, each from a key of its own.

        Args:
          makers: a function for every layer, such as `[lambda rngs: GRU(64, rngs=rngs)] * 8`. Layers of one
            function are drawn at once, however many they are.
          unroll: without stages, this many layers of a kind or fewer are unrolled, which is some percent
            faster and takes some memory; more are a loop over one.
        Raises:
          ValueError: the makers make no layers, or a layer has variables that its calls would change.
        """
        use = "a list of functions that make a layer, such as [lambda rngs: GRU(64, rngs=rngs)] * 8"
        require_instance("makers", makers, Sequence, use)
        for maker in makers:
            if isinstance(maker, nnx.Module):
                name = type(maker).__name__
                raise ValueError(
                    f"makers of a Stack: a {name} is a layer already.\n"
                    f"Fix: give functions, such as [lambda rngs: {name}(..., rngs=rngs)] * 8."
                )
            require_instance("a maker of a Stack", maker, Callable, use)
            check_takes(maker, ("rngs",), "a maker of a Stack", f"use {use}")
        require_instance("rngs", rngs, nnx.Rngs, "nnx.Rngs(seed)")
        self._source, self.unroll = _Source(tuple(makers), same_under_vmap(rngs.params())), unroll
        structures = [self._source.looks[id(maker)].structure for maker in makers]
        kinds = [kind for n, kind in enumerate(structures) if kind not in structures[:n]]
        self.kind_of = tuple(map(kinds.index, structures))
        self.kinds, self.slots = (), NO_SLOTS  # names that are taken
        names = [kind.name for kind in kinds]
        self.kinds = tuple(
            f"{name}{names[:number].count(name)}"
            if names.count(name) > 1 or hasattr(self, name)  # as for a class called Layer
            else name
            for number, name in enumerate(names)
        )
        self.slots = make_slots((len(makers),), kind_of=self.kind_of) if makers else NO_SLOTS
        self._draw()

    def __len__(self) -> int:
        return len(self.kind_of)

    def maker(self, number: int) -> Callable[[nnx.Rngs], Any]:
        """The function that makes a layer; until the stack is placed."""
        assert self._source is not None
        return self._source.makers[number]

    def place(self, slots: Slots) -> None:
        """Draws the layers again, now in these slots; each has the same values as before.

        Call it once, in the function that made the stack: under `jax.jit` the earlier values cost nothing.
        """
        own = [
            [layer for layer, kind in enumerate(self.kind_of) if kind == number]
            for number in range(len(self.kinds))
        ]
        assert own == [sorted(layer for layer in rows if layer >= 0) for rows in slots.rows]
        self.slots = slots
        self._draw()
        self._source = None

    def initial_carry(self, rows: int) -> dict[str, Any]:
        """The initial state of all layers: by kind, variables [rows of the stack, rows, ...]."""
        return {
            name: _initial_carry(getattr(self, name), name, num_rows, rows)
            for name, num_rows in zip(self.kinds, map(len, self.slots.rows), strict=True)
        }

    def layer(self, number: int) -> Any:
        """One layer by its number, as an ordinary module with these values."""
        kind = self.kind_of[number]
        graphdef, state = nnx.split(getattr(self, self.kinds[kind]))
        row = self.slots.rows[kind].index(number)
        return nnx.merge(graphdef, jax.tree.map(lambda a: a[row], state))

    def __call__(self, carry: dict[str, Any], x: Any, at: At) -> tuple[Any, ...]:
        """All layers, one after the other, in plain Python: what a step must be equal to.

        Args:
          carry: as `initial_carry` gives it.
        Returns:
          as a layer: the carry, y, and a `Sums` if any of the layers adds to the loss.
        """
        carry, total = dict(carry), []
        for number, kind in enumerate(self.kind_of):
            name, row = self.kinds[kind], self.slots.rows[kind].index(number)
            before = jax.tree.map(lambda a, row=row: a[row], values(carry[name]))
            at = at._replace(layer=number)
            after, x, *sums = run_layer(name, self.layer(number), before, x, at)
            total += sums
            carry[name] = jax.tree.map(
                lambda v, a, row=row: v.replace(v[...].at[row].set(a)),
                carry[name],
                after,
                is_leaf=is_variable,
            )
        return carry, x, *([functools.reduce(_both, total)] if total else [])

    def _draw(self) -> None:
        for kind, name in enumerate(self.kinds):
            setattr(self, name, self.draw_kind(kind, self.slots.rows[kind]))

    def draw_kind(self, kind: int, rows: Sequence[int]) -> Any:
        """The layers of a kind with these numbers in the rows of a stack, until the stack is placed.

        Args:
          rows: -1 is a row of zeros; one is another number.
        """
        source, name = self._source, self.kinds[kind]
        assert source is not None, "a stack is placed once"
        makers = {id(source.makers[layer]): source.makers[layer] for layer in rows if layer >= 0}
        graphdef: Any = None
        stacked: Any = None
        for maker in makers.values():
            mine = [layer >= 0 and source.makers[layer] is maker for layer in rows]

            def draw(layer, is_mine, maker=maker):
                nonlocal graphdef
                key = jax.random.fold_in(source.key, layer)
                graphdef, state = nnx.split(made(maker, key))
                return jax.tree.map(lambda a: jnp.where(is_mine, a, jnp.zeros_like(a)), state)

            ids = jnp.asarray([max(layer, 0) for layer in rows], jnp.int32)
            every = _one_by_one if source.looks[id(maker)].factorizes else jax.vmap
            drawn = every(draw)(ids, jnp.asarray(mine))
            stacked = drawn if stacked is None else jax.tree.map(jnp.add, stacked, drawn)

        def annotate(variable):
            dims = variable.get_metadata("out_sharding", None) or (None,) * (variable.ndim - 1)
            metadata = {"out_sharding": (LAYERS, *dims), KIND: name, "eager_sharding": False}
            return type(variable)(variable[...], **{**variable.get_metadata(), **metadata})

        state = jax.tree.map(annotate, stacked, is_leaf=is_variable)
        return nnx.merge(graphdef, state)


NO_SLOTS = Slots((), (), (), (), ())


def _both(sums: Sums, others: Sums) -> Sums:
    """Sums that are added up, by name."""
    names = {**sums.metrics, **others.metrics}
    return jax.tree.map(jnp.add, sums.with_names(names), others.with_names(names))


def run_layer(name: str, layer: Any, carry: Any, x: Any, at: At) -> tuple[Any, ...]:
    """What a layer of a kind of this name returns for a block; checked.

    One that mixes rows is called for each group of them.

    Raises:
      ValueError: it returns something else than two things, or three of which the last are sums.
    """

    def run(carry: Any, x: Any, at: At) -> tuple[Any, ...]:
        out = layer(carry, x, at)
        if not isinstance(out, tuple) or len(out) not in (2, 3):
            raise ValueError(
                f"layer {name} returns {in_words(out)}.\nFix: return (carry, y) or (carry, y, sums), or wrap "
                f"a module that returns y alone: jaxpar.nn.Stateless(module)."
            )
        return (*out[:2], *(checked_sums(sums, f"layer {name}") for sums in out[2:]))

    time, size = int(at.time_major), getattr(layer, "rows_together", None)
    if size is None:
        return run(carry, x, at)

    def groups(tree: Any, dim: int) -> Any:  # [..., rows, ...] -> [groups, ..., size, ...]
        def of(a: Any) -> Any:
            own = min(dim, jnp.ndim(a) - 1)  # arrays [rows] have no time
            if own < 0:
                return a
            return jnp.moveaxis(a.reshape(*a.shape[:own], -1, size, *a.shape[own + 1 :]), own, 0)

        return jax.tree.map(of, tree)

    def rows(tree: Any, dim: int) -> Any:  # and back
        def of(a: jax.Array) -> jax.Array:
            a = jnp.moveaxis(a, 0, dim)
            return a.reshape(*a.shape[:dim], -1, *a.shape[dim + 2 :])

        return jax.tree.map(of, tree)

    def of_group(carry: Any, x: Any, batch: Any, row: Any) -> tuple[Any, ...]:
        after, y, *sums = run(carry, x, at._replace(batch=batch, row=row))
        for what, tree, dim in (("the carry that it returns", after, 0), ("its output", y, time)):
            for leaf in jax.tree.leaves(tree):
                require(
                    leaf.shape[dim : dim + 1] == (size,),
                    f"layer {name} is called for {size} rows (rows_together), and {what} has the shape "
                    f"{list(leaf.shape)}.\nFix: let dim {dim} be these rows, or say time_major = False in a "
                    f"model without time.",
                )
        return after, y, *sums

    first_rows = at.row + jnp.arange(0, jax.tree.leaves(x)[0].shape[time], size)
    has_rows = jax.tree.map(lambda a: 0 if jnp.ndim(a) else None, at.batch)
    after, y, *sums = jax.vmap(of_group, (0, 0, has_rows, 0))(
        groups(carry, 0), groups(x, time), groups(at.batch, time), first_rows
    )
    sums = jax.tree.map(functools.partial(jnp.sum, axis=0), sums)
    return rows(after, 0), rows(y, time), *sums


def values(tree: Any) -> Any:
    """A tree of variables as one of arrays."""
    return jax.tree.map(
        lambda leaf: leaf.get_value() if is_variable(leaf) else leaf, tree, is_leaf=is_variable
    )


def wrap_like(tree: Any, like: Any) -> Any:
    """A tree of arrays as one of variables, with the metadata of another."""
    return jax.tree.map(
        lambda variable, value: variable.replace(value), like, tree, is_leaf=is_variable
    )


def made(make: Callable[[nnx.Rngs], Any], seed: int | jax.Array) -> Any:
    """The module that a function makes, of a seed or a key; nothing is placed yet."""
    with nnx.use_eager_sharding(False):
        return make(nnx.Rngs(new_key(seed) if isinstance(seed, int) else seed))


class _Kind(NamedTuple):
    """What tells a kind of layer from the others."""

    name: str
    graphdef: Any
    shapes: tuple[Any, ...]


class _Look(NamedTuple):
    """What a maker makes.

    Attributes:
      factorizes: whether LAPACK draws the layer: an orthogonal kernel is the Q of a QR decomposition.
    """

    structure: _Kind
    factorizes: bool


def _look_at(make: Callable[[nnx.Rngs], Any]) -> _Look:
    """Traces it, twice; nothing is drawn."""

    def layer() -> Any:
        module, use = made(make, 0), "an nnx.Module; return it from the function"
        require_instance("what a maker of a Stack returns", module, nnx.Module, use)
        return module

    module, program = traced_twice("layer", layer)
    names = {eqn.primitive.name for eqn in equations_in(program.jaxpr)}
    return _Look(_structure(module), any(n.startswith(FACTORIZATIONS) for n in names))


def traced_twice(what: str, make: Callable[[], Any]) -> tuple[Any, ClosedJaxpr]:
    """The module that a function makes, of shapes, and the program that gives its variables.

    Args:
      what: the module is, in messages.
    Raises:
      ValueError: the function makes something else when it is called again.
    """

    def trace() -> tuple[Any, dict[str, Any], ClosedJaxpr]:
        graphdef: Any = None

        def draw() -> Any:
            nonlocal graphdef
            graphdef, state = nnx.split(make())
            return state

        program, state = jax.make_jaxpr(draw, return_shape=True)()
        shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(state)}
        return nnx.merge(graphdef, state), shapes, program

    (module, shapes, program), (again, other_shapes, other_program) = trace(), trace()
    what = f"{what} {type(module).__name__}"
    one, two = _attributes(module) | shapes, _attributes(again) | other_shapes
    for name in {**one, **two}:
        values = one.get(name), two.get(name)
        if not same_value(*values):
            raise ValueError(
                f"{what} has {name}={values[0]!r:.40}, and {values[1]!r:.40} where the same function makes "
                f"it again.\nFix: make it of rngs and fixed numbers, or give a function to each layer."
            )
    if found := difference(program, other_program):
        place = f" ({found.source_line})" if found.source_line else ""
        raise ValueError(
            f"{what}{place}: {[*shapes][found.outputs[0]]} begins with other numbers each time it is made.\n"
            f"Fix: draw it from rngs, such as jax.random.normal(rngs.params(), shape)."
        )
    return module, program


def _attributes(module: Any) -> dict[str, Any]:
    """All that a module and those within it have, by name."""
    return {
        ".".join(map(str, (*path, name))): value
        for path, own in nnx.iter_modules(module)
        for name, value in vars(own).items()
        if not name.startswith("_pytree")
    }


def _structure(module: Any) -> _Kind:
    graphdef, state = nnx.split(module)
    name = getattr(module, "kind_name", None) or type(module).__name__
    check_variables(f"layer {name}", state)
    for path, leaf in nnx.to_flat_state(state):
        require(
            not is_key(leaf),
            f"layer {name} has {'.'.join(map(str, path))}, a random key, the same in every step.\n"
            f"Fix: draw from at.key, or make the key in the call: jax.random.key(0).",
        )
    size = getattr(module, "rows_together", None)
    require(
        size is None or (isinstance(size, int) and size > 0),
        f"layer {name} has rows_together={size!r}.\nFix: use a positive number of rows, or None.",
    )
    check_takes(
        module,
        ("carry", "x", "at"),
        f"layer {name}",
        "write __call__(self, carry, x, at), or wrap it: jaxpar.nn.Stateless(module), .Recurrent(cell)",
    )
    shapes = tuple(
        (tuple(leaf.shape), np.dtype(leaf.dtype).name) for leaf in jax.tree.leaves(state)
    )
    return _Kind(name.lower(), graphdef, shapes)


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `jax.vmap(function)`, without batches: on CPU, LAPACK's share the threads that wait for them.

    With as many devices as threads, all of them may wait forever (jaxlib 0.10.1).
    """
    return lambda *args: jax.lax.map(lambda rows: function(*rows), args)


def check_rows_of_carry(kind: str, carry: Any, rows: int) -> None:
    """Raises a ValueError if an array of `initial_carry(rows)` of a kind of layers has not so many rows."""
    for path, leaf in jax.tree.leaves_with_path(carry):
        require(
            leaf.shape[:1] == (rows,),
            f"layer {kind}: its initial_carry({rows}){jax.tree_util.keystr(path)} has the shape "
            f"{list(leaf.shape)}.\nFix: give [rows, ...], with as many rows as it is asked for.",
        )


def _initial_carry(layer: Any, kind: str, num_rows: int, rows: int) -> Any:
    """Of one kind: variables [num_rows, rows, ...]; an empty tuple if its layers have no state."""
    if not hasattr(layer, "initial_carry"):
        return ()
    graphdef, state = nnx.split(layer)

    def initial(state):  # of one layer: what it reads of itself has no dim of rows of the stack
        carry = nnx.merge(graphdef, state).initial_carry(rows)
        check_rows_of_carry(kind, carry, rows)
        return carry

    carry = jax.vmap(initial, axis_size=num_rows)(state)
    dims = getattr(layer, "carry_dims", None)
    if dims is None:
        dims = jax.tree.map(lambda a: (BATCH, *[None] * (a.ndim - 2)), carry)

    def annotate(stacked, dims):
        shape = stacked.shape[1:]
        require(
            len(dims) == len(shape),
            f"layer {kind}: initial_carry({rows}) has an array of shape {shape} and dims {dims}.\n"
            f"Fix: give each dim a name, or None.",
        )
        metadata = {"out_sharding": (LAYERS, *dims), KIND: kind, "eager_sharding": False}
        return nnx.Variable(stacked, **metadata)

    return jax.tree.map(annotate, carry, dims)
