"""Whether functions with their own backward pass (`jax.custom_vjp`) give the same gradients on every mesh.

Such a function may do anything with the gradient that it receives. A step gives each device and microbatch
some of the rows, and each chunk some of the time steps. So the gradients of a part of the model must be the
sum of those of its rows, and of its chunks. They are if a function changes each number by itself, as clipping
does, and not if it divides by the norm of a whole array, or changes the gradient of a parameter.

A step that runs in units begins each with the gradient of the mean loss, if the weight of `last` depends on
the batch alone. Otherwise it begins with that of the sum: then these functions must be linear.

Both are tried before a run, on few rows, with gradients of several sizes.
"""

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.base.at import At
from jaxpar.facts import ModelFacts
from jaxpar.layout import Layout, Outer
from jaxpar.model import Sums, made, run_layer
from jaxpar.rows import draw_outer, quick_jit
from jaxpar.trace.bound import bound
from jaxpar.trace.jaxprs import equations_in
from jaxpar.trace.places import place_of_equation

# By what gradients are multiplied: powers of two, which change no digits. Those of float16 have fewer.
SCALES, SCALES_OF_FLOAT16 = (2.0**-20, 2.0**-10, 1.0, 2.0**10, 2.0**20), (2.0**-5, 1.0, 2.0**5)

# How far gradients may be from those that they must equal, in the Euclidean norm: where a function jumps, as
# a sign does, rounding may change a few numbers. The mistakes change most of them.
TOLERANCE = 0.1

_NOWHERE = -1  # the dim of rows, or of time, of an array that has none

_PACKAGE = f"{Path(__file__).parent}/"


class _Part(NamedTuple):
    """A part of the model: `first`, a layer of a kind, or `last`.

    Attributes:
      what: it is, in words.
      run: (variables, carry, x, block of the batch, its first row and step) -> ((carry, x, loss), the weight
        that a layer adds, which must be 0).
      inputs: values of variables, carry and x; () for what it does not take.
    """

    what: str
    run: Callable[..., Any]
    inputs: tuple[Any, Any, Any]


def check_custom_backward(layout: Layout) -> None:
    """Checks backward passes that are not JAX's, by running parts of the model forward and backward.

    Each part runs on one device, in its real size, on few rows; those without such functions don't run.

    Raises:
      ValueError: gradients of a part would depend on the mesh; it names the functions. Or the weight of
        `last` has a gradient, which a step that runs in units leaves out.
    """
    facts, parallel = layout.facts, layout.parallel
    if parallel.mesh.data == 1 and not parallel.runs_in_units:
        return
    begins_with_sum = parallel.runs_in_units and not facts.knows_weight
    done = "backward", begins_with_sum, parallel.num_chunks
    if done in facts.checked:
        return
    functions = _functions(facts)
    if functions or begins_with_sum:
        trial = _Trial(layout)
        if begins_with_sum:
            trial.check_weight()
        for part in trial.parts(functions):
            trial.check(part, functions[part.what], is_linear=begins_with_sum)
    facts.checked.add(done)


def _functions(facts: ModelFacts) -> dict[str, str]:
    """By the part of the model, the functions with a backward pass of their own, in words; not jaxpar's."""
    graphdef, state = nnx.split(facts.model)

    def first(state, block):
        return nnx.merge(graphdef, state).first(block, facts.at(block))

    def last(state, y, block):
        return nnx.merge(graphdef, state).last(y, block, facts.at(block))

    layers = zip(facts.kinds, facts.traces.layers, strict=True)
    parts = {
        "`first`": (first, (state, facts.block)),
        **{f"layer {name}": each for name, each in layers},
        "`last`": (last, (state, facts.traces.y, facts.block)),
    }
    found = {}
    for what, (run, args) in parts.items():
        trace = functools.partial(jax.make_jaxpr(run), *args)
        eqns = equations_in(bound(facts.task.axes, trace).jaxpr)
        names = dict.fromkeys(name for eqn in eqns if (name := _function_of(eqn)))
        if names:
            found[what] = ", ".join(names)
    return found


def _function_of(eqn: Any) -> str:
    """The function that an equation calls, if it has a backward pass of its own; "" if none of a user's."""
    if not eqn.primitive.name.startswith("custom_vjp_call"):
        return ""
    program = eqn.params["call_jaxpr"]
    about, place = getattr(program, "jaxpr", program).debug_info, place_of_equation(eqn)
    if str(about.func_filename).startswith(_PACKAGE):
        return ""
    return about.func_name + f" ({place})" * bool(place)


class _Trial:
    """Parts of a model, run on few rows of a batch, at once and in pieces."""

    def __init__(self, layout: Layout):
        self.layout, self.facts = layout, layout.facts
        self.rng, self.outer = np.random.default_rng(0), Outer(layout, layout.abstract_model())
        together = math.lcm(*self.facts.rows_together.values())
        self.num_rows = min(2 * together, self.facts.batch_size)
        batch = layout.task.example_batch()
        few = jax.tree.map(lambda a: np.asarray(a)[: self.num_rows] if np.ndim(a) else a, batch)
        self.block = jax.device_get(self.facts.to_block(few))

    def parts(self, names: Container[str]) -> Iterator[_Part]:
        """Those of these names."""
        if "`first`" in names:
            yield self.first()
        for kind, name in enumerate(self.facts.kinds):
            if f"layer {name}" in names:
                yield self.layer(kind)
        if "`last`" in names:
            yield self.last()

    def first(self) -> _Part:
        """Before the layers."""

        def run(variables, carry, x, block, row, step):
            leaves, frozen = variables
            x = self.outer.run_first(leaves, frozen, self._at(block, row, step))
            return ((), x, jnp.float32(0)), jnp.float32(0)

        return _Part("`first`", run, (draw_outer(self.layout, self.outer.first), (), ()))

    def last(self) -> _Part:
        """After the layers."""

        def run(variables, carry, y, block, row, step):
            return ((), (), self._sums(variables, y, block, row, step).loss), jnp.float32(0)

        y = self._random(self.facts.passed)
        return _Part("`last`", run, (draw_outer(self.layout, self.outer.last), (), y))

    def layer(self, kind: int) -> _Part:
        """The first layer of a kind."""
        name, number = self.facts.kinds[kind], self.facts.kind_of.index(kind)
        maker = self.facts.model.layers.maker(number)

        def draw():
            layer = made(maker, 0)
            begins = hasattr(layer, "initial_carry")
            return nnx.state(layer), layer.initial_carry(self.num_rows) if begins else ()

        graphdef = nnx.graphdef(nnx.eval_shape(lambda: made(maker, 0)))

        def run(state, carry, x, block, row, step):
            at = self._at(block, row, step)._replace(layer=jnp.int32(number))
            after, y, *sums = run_layer(name, nnx.merge(graphdef, state), carry, x, at)
            loss, weight = (sums[0].loss, sums[0].weight) if sums else (jnp.float32(0),) * 2
            return (after, y, loss), weight

        x = self._random(self.facts.traces.layers[kind][1][2])
        return _Part(f"layer {name}", run, (*quick_jit(self.layout, draw)(), x))

    def check_weight(self) -> None:
        """Raises a ValueError if the weight of `last` has a gradient."""
        part = self.last()
        floats, whole = _floats(part.inputs)

        def weight(own: Any) -> jax.Array:
            variables, _, y = whole(own)
            return self._sums(variables, y, self.block).weight

        if any(np.any(a) for a in jax.device_get(quick_jit(self.layout, jax.grad(weight))(floats))):
            raise ValueError(
                "the weight of `last` has a gradient, which pipelines and microbatches leave out. "
                "Fix: return jax.lax.stop_gradient(weight), or compute it from the batch alone."
            )

    def check(self, part: _Part, functions: str, *, is_linear: bool) -> None:
        """Compares gradients of a part with those of its pieces, and with those of larger gradients.

        Args:
          functions: of the part, in words.
          is_linear: whether they must be linear.
        Raises:
          ValueError: they differ.
        """
        chunks, what = self.layout.parallel.num_chunks, part.what
        what = f"{what}: the backward pass of {functions}"
        at_once, has_weight = self._gradients(part)
        ways = {"two halves of the rows": (2 - self.num_rows % 2, 1)}
        if chunks > 1:
            ways[f"{chunks} chunks of time"] = 1, chunks
        for way, pieces in ways.items():
            if any(map(_differ, self._gradients(part, *pieces)[0], at_once)):
                raise ValueError(
                    f"{what} gives other gradients for {way} than at once. Fix: change each number of the "
                    f"gradient of an activation by itself, or clip in the optimizer."
                )
        if (is_linear or has_weight) and any(_differ(found, at_once[0]) for found in at_once):
            raise ValueError(
                f"{what} is not linear, and the weight of the loss is not known from the batch. "
                f"Fix: compute the weight from the batch, or use no stages, microbatches or chunks."
            )

    def _gradients(
        self, part: _Part, halves: int = 1, chunks: int = 1
    ) -> tuple[list[list[np.ndarray]], bool]:
        """Gradients of the floats that a part takes, over their scale, for each scale.

        Args:
          halves, chunks: pieces of the rows, and of the time steps, that are run one after the other.
        Returns:
          them, and whether the part adds to the weight.
        """
        floats, whole = _floats(part.inputs)
        out = jax.eval_shape(lambda own: part.run(*whole(own), self.block, 0, 0)[0], floats)

        def run(own: Any) -> Any:
            variables, carry, x = whole(own)
            rows, loss, weight = [], jnp.float32(0), jnp.float32(0)
            for half in range(halves):
                of_rows = [_cut(tree, self._rows(tree), halves, half) for tree in (x, self.block)]
                after, ys = _cut(carry, _first_dims(carry), halves, half), []
                for chunk in range(chunks):
                    x_and_block = [
                        _cut(tree, self._steps(whole), chunks, chunk)
                        for tree, whole in zip(of_rows, (x, self.block), strict=True)
                    ]
                    row, step = half * self.num_rows // halves, chunk * self.num_steps // chunks
                    (after, y, own_loss), own_weight = part.run(
                        variables, after, *x_and_block, row, step
                    )
                    ys.append(y)
                    loss, weight = loss + own_loss, weight + own_weight
                rows.append((after, _joined(ys, self._steps(out[1]))))
            afters, ys = zip(*rows, strict=True)
            after = _joined(afters, _first_dims(out[0]))
            return (after, _joined(ys, self._rows(out[1])), loss), weight

        def gradients(own: Any, cotangents: Any) -> Any:
            _, vjp, weight = jax.vjp(run, own, has_aux=True)
            return vjp(cotangents)[0], weight

        rng = np.random.default_rng(0)
        g = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), out)
        g = *g[:2], np.ones_like(g[2])
        is_short = any(a.dtype == jnp.float16 for a in jax.tree.leaves((floats, g)))
        quick, found, weight = quick_jit(self.layout, gradients), [], 0.0
        for scale in SCALES_OF_FLOAT16 if is_short else SCALES:
            scaled = jax.tree.map(lambda a, scale=scale: (a * scale).astype(a.dtype), g)
            own, weight = jax.device_get(quick(floats, scaled))
            found.append([np.float32(a) / scale for a in own])
        return found, bool(weight)

    # ---- pieces ----

    @property
    def num_steps(self) -> int:
        """Time steps of a window."""
        return self.facts.num_steps or 1

    def _rows(self, tree: Any) -> Any:
        """The dim of the rows of each array; None where there is none."""
        time = int(self.facts.time_major)
        dims = (min(time, np.ndim(a) - 1) for a in jax.tree.leaves(tree))
        return self._dims(tree, dims, self.num_rows)

    def _steps(self, tree: Any) -> Any:
        """Likewise of the time steps."""
        leaves = jax.tree.leaves(tree)
        dims = (0 if self.facts.time_major and np.ndim(a) > 1 else -1 for a in leaves)
        return self._dims(tree, dims, self.num_steps)

    def _dims(self, tree: Any, dims: Iterable[int], size: int) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        found = [
            dim if dim >= 0 and np.shape(a)[dim] == size else _NOWHERE
            for a, dim in zip(leaves, dims, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    # ---- values ----

    def _sums(self, variables: Any, y: Any, block: Any, row: int = 0, step: int = 0) -> Sums:
        """What `last` gives of a block."""
        (leaves, frozen), at = variables, self._at(block, row, step)
        return self.outer.run_last(leaves, frozen, y, at, is_part=False)

    def _at(self, block: Any, row: int, step: int) -> At:
        return self.facts.at(block)._replace(row=jnp.int32(row), time=jnp.int32(step))

    def _random(self, shapes: Any) -> Any:
        """Normal numbers for few rows of arrays of the whole batch."""
        dim, size = int(self.facts.time_major), self.facts.batch_size

        def draw(a: Any) -> np.ndarray:
            few = [
                self.num_rows if n == dim and own == size else own for n, own in enumerate(a.shape)
            ]
            return self.rng.standard_normal(few).astype(a.dtype)

        return jax.tree.map(draw, shapes)


def _floats(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The floating-point arrays of a tree, and a function that puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(a.dtype, jnp.floating) for a in leaves]

    def whole(floats: list[Any]) -> Any:
        given = iter(floats)
        pairs = zip(is_float, leaves, strict=True)
        return jax.tree.unflatten(structure, [next(given) if own else a for own, a in pairs])

    return [a for own, a in zip(is_float, leaves, strict=True) if own], whole


def _first_dims(tree: Any) -> Any:
    return jax.tree.map(lambda _: 0, tree)


def _cut(tree: Any, dims: Any, pieces: int, number: int) -> Any:
    """One of so many equal pieces of arrays along these dims."""
    if pieces == 1:
        return tree

    def cut(a: Any, dim: int) -> Any:
        return a if dim == _NOWHERE else jnp.split(jnp.asarray(a), pieces, dim)[number]

    return jax.tree.map(cut, tree, dims)


def _joined(pieces: Sequence[Any], dims: Any) -> Any:
    """The arrays that were cut."""
    if len(pieces) == 1:
        return pieces[0]

    def join(dim: int, *parts: Any) -> Any:
        return parts[0] if dim == _NOWHERE else jnp.concatenate(parts, dim)

    return jax.tree.map(join, dims, *pieces)


def _differ(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    """Whether any array is another one, by far more than by rounding."""
    norm = np.linalg.norm
    pairs = zip(found, expected, strict=True)
    return any(norm(a - b) > TOLERANCE * max(norm(a), norm(b)) for a, b in pairs)
