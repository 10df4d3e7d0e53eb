"""Whether an optimizer updates stacked layers as it would update arrays that are each layer's own.

Layers of a kind are one array [layers, ...]; with unequal numbers of them on stages it has empty rows, which
are zeros. That makes no difference to an optimizer that is elementwise, or takes a norm over all parameters.
One that looks at whole arrays (at norms, rows, columns, or the number of dims) updates the stack in another
way than it would update layers. Such an optimizer is found before a run, on small random arrays:

    gru.w_x  [layer 0, empty, layer 1]    the updates of its rows must be
    gru.w_x  layer 0,  layer 1            those of these arrays, and 0 in the empty row
"""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxpar.model.stack import KIND
from jaxpar.partition.storage import Storage
from jaxpar.sharding import is_variable, named_leaves
from jaxpar.trace.counts import reductions
from jaxpar.trace.evaluate import evaluate
from jaxpar.trace.jaxprs import equations_in


class Trial(NamedTuple):
    """How large the arrays of a trial are at most.

    Attributes:
      steps: how many, with other gradients and parameters each.
      layers: of a kind.
      size: of the two largest dims of an array; others are up to 4.
    """

    steps: int
    layers: int
    size: int


# Some optimizers act at every n-th step only, others on large arrays only: Adafactor factors those from 128.
TRIALS = Trial(40, 2, 4), Trial(2, 8, 130)
# Factors of parameters and gradients, as powers of 10, drawn for each step and row: clips and ratios differ.
FACTORS = (-2, 4), (-3, 3)

# How far apart equal updates may be, relative to each number and to the largest of its row: sums are rounded
# in another order, and of a hundred numbers, one sign may flip.
TOLERANCE, OF_LARGEST, FLIPPED = 1e-4, 1e-6, 0.01


@jax.tree_util.register_pytree_with_keys_class
class Own(tuple[Any, ...]):
    """Arrays of single layers, in the place of their stack. Asked for a shape, it has that of one array."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """The arrays, all under the name that an array has in its variable: masks look at paths."""
        return [(jax.tree_util.GetAttrKey("value"), array) for array in self], None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Any) -> "Own":
        """The same with other arrays."""
        return cls(arrays)


def check_stacking(storage: Storage, optimizer: optax.GradientTransformation) -> None:
    """Checks, by trial, the optimizer of a task's own `make_optimizer`; any of an `OptimizerConfig` passes.

    Random numbers that it draws are left out of the comparison, for they have the same distribution in a
    stack. They must not depend on the mesh, though.

    Raises:
      ValueError: it updates a stack of layers, or one with empty rows, in another way than single layers; or
        it draws random numbers, and the rows of a stack are not its layers in order.
    """
    task, params = storage.facts.task, storage.params
    rows = dict(zip(storage.facts.kinds, storage.partition.slots.rows, strict=True))
    if not (task.has_own_optimizer and rows):
        return
    what, where = f"the optimizer of task {task.name}", f"placement={storage.partition.placement}"
    elementwise = "an elementwise optimizer such as optax.adamw"
    has_empty = {kind for kind, own in rows.items() if -1 in own}
    moved = [kind for kind, own in rows.items() if kind in has_empty or list(own) != sorted(own)]
    if moved and draws(optimizer, params):
        raise ValueError(
            f"{what} draws random numbers for whole stacks, and {where} has layers in rows "
            f"{list(rows[moved[0]])} ({moved[0]}).\nFix: use a placement that fills all rows in order, or an "
            f"optimizer without noise."
        )

    def tried(trial: Trial, empty: Container[str]) -> str:
        layers = {kind: range(min(trial.layers, len({*own} - {-1}))) for kind, own in rows.items()}
        few = {k: (0, *[-1] * (k in empty), *own[1:]) for k, own in layers.items()}
        return difference(optimizer, params, few, trial)

    for trial in TRIALS:
        try:
            found = tried(trial, has_empty)
        except _Refused as error:  # as where it holds arrays of the model's sizes
            if not (sums := _of_update(reductions, optimizer, params)):
                return
            raise ValueError(
                f"{what} combines numbers of an array ({', '.join(sorted(sums))}), and cannot be tried on "
                f"small arrays: {error}.\nFix: use {elementwise}."
            ) from error
        if found and has_empty and not tried(trial, ()):
            raise ValueError(
                f"{what} does not ignore the empty rows that {where} leaves in {found}.\n"
                f"Fix: use as many layers of each kind on every stage, or {elementwise}."
            )
        if found:
            raise ValueError(
                f"{what} updates {found}, a stack of layers, in another way than each layer's own array.\n"
                f"Fix: use {elementwise}, masked by names."
            )


def draws(optimizer: optax.GradientTransformation, params: Any) -> bool:
    """Whether an optimizer draws random numbers for its updates."""
    program = _of_update(lambda update, *trees: jax.make_jaxpr(update)(*trees), optimizer, params)
    return any(eqn.primitive.name == "random_bits" for eqn in equations_in(program.jaxpr))


def difference(
    optimizer: optax.GradientTransformation,
    params: Any,
    rows: Mapping[str, Sequence[int]],
    trial: Trial,
) -> str:
    """The first parameter that is updated otherwise where layers are stacked, with its shape; "" if none is.

    Args:
      params: an `nnx.State` of shapes, with layers in stacks.
      rows: of the stacks that are tried, by kind: the number of a layer, or -1 for an empty row.
    """
    rng, leaves = np.random.default_rng(0), [*named_leaves(params)]
    small = functools.partial(_small, rng, trial)
    drawn = [_map(functools.partial(small, factors), params) for factors in FACTORS]

    def updates(place: Callable[[Any, Own], Any]) -> list[np.ndarray]:
        """Of all steps, in stacks; `place` makes a leaf of the tree of a variable and single layers."""

        def placed(variable: Any) -> Any:
            if (kind := _kind(variable)) is None:
                return variable
            layers = range(max(rows[kind]) + 1)
            return place(variable, Own(variable.get_value()[:, layer] for layer in layers))

        made = _updates(optimizer, trial.steps, *(_map(placed, tree) for tree in drawn))
        found = jax.tree.leaves(made, is_leaf=lambda node: isinstance(node, Own))
        return [
            _stacked(a, rows[_kind(variable)]) if isinstance(a, Own) else a
            for (_, variable), a in zip(leaves, found, strict=True)
        ]

    stacked = updates(lambda variable, own: variable.replace(_stacked(own, rows[_kind(variable)])))
    first = ""
    # Masks look at variables, or at paths up to the last key. One of the two is as it is with stacks.
    for place in (lambda variable, own: variable.replace(own), lambda _, own: own):
        try:
            pairs = zip(leaves, stacked, updates(place), strict=True)
            differ = [leaf for leaf, a, b in pairs if not _equal(a, b, _kind(leaf[1]) is not None)]
        except _Refused:
            differ = [leaf for leaf in leaves if _kind(leaf[1]) is not None]
        if not differ:
            return ""
        first = f"{differ[0][0]} {list(differ[0][1].shape)}"
    return first


def _updates(
    optimizer: optax.GradientTransformation, num_steps: int, params: Any, grads: Any
) -> Any:
    """The updates of all steps; parameters and gradients are those of each step."""

    def of_step(number: int) -> tuple[Any, Any]:
        return jax.tree.map(lambda a: a[number], (params, grads))

    def update(state: Any, trees: tuple[Any, Any]) -> tuple[Any, Any]:
        return optimizer.update(trees[1], state, trees[0])

    first, updates = of_step(0), []
    with jax.default_device(_cpu()), jax.numpy_dtype_promotion("standard"):
        try:
            init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(first[0])
            program, shapes = jax.make_jaxpr(update, return_shape=True)(state, first)
        except Exception as error:
            raise _Refused(error) from error
        with np.errstate(all="ignore"):
            leaves = evaluate(init, jax.tree.leaves(first[0]))
            for number in range(num_steps):
                made = evaluate(program, [*leaves, *jax.tree.leaves(of_step(number))])
                count = len(made) - len(leaves)
                updates.append(made[:count])
                leaves = made[count:]
    return jax.tree.structure(shapes[0]).unflatten(map(np.stack, zip(*updates, strict=True)))


class _Refused(Exception):  # noqa: N818 - nobody is told of it
    """An optimizer does not take the arrays of a trial."""


def _cpu() -> Any:
    """A CPU of this process; None, for JAX's default device, if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _of_update(
    function: Callable[..., Any], optimizer: optax.GradientTransformation, params: Any
) -> Any:
    """What a function that traces makes of an optimizer's update."""
    with jax.numpy_dtype_promotion("standard"):
        return function(optimizer.update, params, jax.eval_shape(optimizer.init, params), params)


def _map(function: Callable[[Any], Any], params: Any) -> Any:
    return jax.tree.map(function, params, is_leaf=is_variable)


def _kind(variable: Any) -> Any:
    """The kind of layer whose stack a variable is; None for one that is no stack."""
    return variable.get_metadata(KIND, None)


def _small(
    rng: np.random.Generator, trial: Trial, factors: tuple[float, float], variable: Any
) -> Any:
    """The variable with random numbers [steps, ...], or of a stack [steps, layers, ...]."""
    is_stack = _kind(variable) is not None
    lead, own = (trial.steps, *[trial.layers] * is_stack), variable.shape[is_stack:]
    limit = min([trial.size, *sorted(own)[-2:-1]])
    own = tuple(min(size, trial.size if size >= limit else 4) for size in own)
    dtype = np.complex64 if np.issubdtype(variable.dtype, np.complexfloating) else np.float32
    factor = 10.0 ** rng.uniform(*factors, size=(*lead, *(1 for _ in own)))
    return variable.replace((factor * rng.standard_normal((*lead, *own), np.float32)).astype(dtype))


def _stacked(arrays: Sequence[Any], rows: Sequence[int]) -> np.ndarray:
    """Arrays [steps, ...] of layers as [steps, rows, ...]."""
    return np.stack([arrays[row] if row >= 0 else np.zeros_like(arrays[0]) for row in rows], 1)


def _equal(a: np.ndarray, b: np.ndarray, has_rows: bool) -> bool:
    """Whether updates [steps, ...] or [steps, rows, ...] are equal, in all steps where they are finite."""
    is_finite = np.isfinite(b).all(tuple(range(1, b.ndim)))
    a, b = a[is_finite], b[is_finite]
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.max(np.abs(b), tuple(range(1 + has_rows, b.ndim)), keepdims=True, initial=0)
        off = ~(
            np.isclose(a, b, TOLERANCE, 0, equal_nan=True) | (np.abs(a - b) <= OF_LARGEST * largest)
        )
    return off.sum() <= FLIPPED * ((a != 0) | (b != 0)).sum()
