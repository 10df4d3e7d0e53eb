"""Parts of a model on few rows: `first`, each kind of layer, and `last` or `predict`, each run alone."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.base.jax_private import call_once
from jaxpar.base.keys import key_data, key_of
from jaxpar.base.parts import LENGTHS, PARTS, part_of
from jaxpar.base.trees import has_time, time_steps
from jaxpar.base.types import Arrays, Batch, Function, Shapes
from jaxpar.data.batches import EndOfStreamError, owned
from jaxpar.model.model import checked_sums
from jaxpar.model.task import Task
from jaxpar.model.tracing import made, naming_errors
from jaxpar.step.parts import Outer, Parts

BATCHES = 4  # from whose first rows they are taken
NOWHERE = -1  # the dim of rows, or of time, of an array that has none

Tree = dict[str, Arrays]


class Part(NamedTuple):
    """A part of the model, as a function of few rows.

    Attributes:
      what: its name in messages.
      run: (variables, inputs, row, time, key) -> outputs. Both are trees by name: inputs are "carry", "x" and
        "batch", one of the outputs may be "sums".
      variables: values.
      draw: gives inputs.
      dims: of rows ("row") and of time steps ("time") in inputs and outputs, trees by their names.
      piece: as `run`, for a piece of the inputs; maybe with "sums" alone.
      mixes: whether the layer says that it mixes rows.
    """

    what: str
    run: Callable[..., Tree]
    variables: Any
    draw: Callable[[], Tree]
    dims: dict[str, Tree]
    piece: Callable[..., Tree]
    mixes: bool = False

    def map(self, along: str, change: Function, *trees: Tree) -> Tree:
        """Inputs or outputs, but sums, with all arrays changed that have such a dim.

        Args:
          change: (dim, arrays, one of each tree) -> array. Of arrays without the dim, that of the last tree
            is taken.
        """

        def of(dim: int, *arrays: Arrays) -> Arrays:
            return arrays[-1] if dim == NOWHERE else change(dim, *arrays)

        names = [name for name in trees[0] if name != "sums"]
        return {n: jax.tree.map(of, self.dims[along][n], *(own[n] for own in trees)) for n in names}

    def take(self, along: str, start: int, stop: int, tree: Tree) -> Tree:
        """Some of the rows, or time steps, of inputs or outputs."""
        return self.map(along, lambda dim, a: a[(slice(None),) * dim + (slice(start, stop),)], tree)


class Trial:
    """Parts of a model, run on few rows.

    Attributes:
      x: shapes of what goes through the layers.
      makers: of each part by its name, in the order in which the model runs them.
      batch, special: see `_rows_of`.
      sizes: how many rows and time steps there are.
      time_parts: how many parts of each window axes of the task's own make.
      key: of random numbers in training; None for predictions.
    """

    def __init__(self, parts: Parts, num_rows: int, num_chunks: int, *, predicts: bool = False):
        """Looks at `first`, which tells the shapes of x."""
        self.parts, self.num_rows, self.num_chunks = parts, num_rows, num_chunks
        self.batch, self.special = batch, _ = _rows_of(
            parts.facts.task, parts.facts.batch, num_rows
        )
        self.jitted = functools.cache(functools.partial(quick_jit, parts))
        facts, sizes = parts.facts, parts.partition.parallel.mesh.sizes
        self.sizes = {"row": num_rows, "time": facts.num_steps or 0}
        self.time_parts = math.prod(sizes[axis] for axis in facts.time_axes)
        self.key = None if predicts else key_of(key_data(0))
        self.outer = Outer(parts, parts.abstract_model(), predicts=predicts)
        self.rng = np.random.default_rng(0)

        def first(variables, batch, at):
            leaves, frozen = variables
            return {"output": self.outer.run_first(leaves, frozen, at)}

        variables, run = draw_outer(parts, self.outer.first), self.placed(first)
        twice = jax.tree.map(lambda a: np.concatenate([a, a]) if np.ndim(a) else a, batch)

        def shape_of_x(batch: Batch) -> Arrays:
            args = variables, {"batch": batch}, 0, 0, None
            return naming_errors("first", lambda: jax.eval_shape(self.jitted(run), *args)["output"])

        self.x, x_of_twice = map(shape_of_x, (batch, twice))
        rows, steps = jax.tree.map(_dim_of_rows, self.x, x_of_twice), parts.facts.num_steps

        def of_time(dim: int, a: Any, timed: bool = True) -> int:
            has_steps = steps and np.shape(a)[dim : dim + 1] == (steps,)
            return dim if timed and has_steps else NOWHERE

        times = jax.tree.map(functools.partial(of_time, 0), self.x)
        self.dims = {
            "row": dict.fromkeys(("x", "output", "gradient"), rows)
            | {"batch": jax.tree.map(lambda a: 0 if np.ndim(a) else NOWHERE, batch)},
            "time": dict.fromkeys(("x", "output", "gradient"), times)
            | {"batch": jax.tree.map(functools.partial(of_time, 1), batch, has_time(batch))},
        }
        inputs = {"batch": batch}
        part = Part(facts.ends[0], run, variables, lambda: inputs, self.dims, run)
        layers = enumerate(facts.kinds)
        self.makers: dict[str, Callable[[], Part]] = {
            "`first`": lambda: part,
            **{f"layer {name}": functools.partial(self.layer, n) for n, name in layers},
            **({"`predict`": self.predict} if predicts else {"`last`": self.last}),
        }

    # ---- the parts ----

    def layer(self, kind: int) -> Part:
        """A layer of a kind: what it returns, the state that it leaves, and the sums that it adds."""
        facts = self.parts.facts
        name, number = facts.kinds[kind], facts.kind_of.index(kind)
        maker, like = facts.model.layers.maker(number), facts.traces.layers[kind][1][2]

        graphdef: Any = None

        @functools.partial(quick_jit, self.parts)
        def draw():
            nonlocal graphdef  # not a result: JAX keeps the trees of results, with all that is in them
            layer = made(maker, 0)
            graphdef, state = nnx.split(layer)
            begins = hasattr(layer, "initial_carry")
            return state, layer.initial_carry(self.num_rows) if begins else ()

        def layer(variables, carry, x, batch, at):
            def run(_, __, *args):
                return nnx.merge(graphdef, variables)(*args)

            at = at._replace(layer=jnp.int32(number))
            after, y, *sums = self.parts.run_padded(run, like, (), (), carry, x, at)
            own = {"sums": checked_sums(sums[0], f"layer {name}")} if sums else {}
            return {"output": y, "carry": after, **own}

        variables, start = call_once(draw)
        run = self.placed(layer)
        # Not below where it starts: a state may be a divisor.
        carry = jax.tree.map(lambda a: a + abs(self.random(a)), jax.device_get(start))
        in_carry = {"row": 0, "time": NOWHERE}
        dims = {
            along: own | {"carry": jax.tree.map(lambda _, dim=in_carry[along]: dim, carry)}
            for along, own in self.dims.items()
        }

        def draw_inputs() -> Tree:
            return {"carry": carry, **self.draw_y()}

        mixes = name in facts.rows_together
        return Part(f"layer {name}", run, variables, draw_inputs, dims, run, mixes)

    def last(self) -> Part:
        """By its sums; and by the gradients of the loss, in which no tolerance hides a mix."""

        def last(variables, x, batch, at):
            leaves, frozen = variables
            with jax.default_matmul_precision("float32"):  # whatever the size of a block
                return {"sums": self.outer.run_last(leaves, frozen, x, at, is_part=False)}

        def with_gradients(variables, x, batch, at):
            def loss(x):
                out = last(variables, x, batch, at)
                return out["sums"].loss, out

            with jax.default_matmul_precision("float32"):
                found, out = jax.grad(loss, has_aux=True)(x)
            # What has no rows is used by all: its gradient is a sum.
            found = jax.tree.map(
                lambda d, dim: 0.0 if dim == NOWHERE else d, found, self.dims["row"]["x"]
            )
            return {"gradient": found, **out}

        variables = draw_outer(self.parts, self.outer.last)
        run, piece = map(self.placed, (with_gradients, last))
        return Part(self.parts.facts.ends[1], run, variables, self.draw_y, self.dims, piece)

    def predict(self) -> Part:
        """By all that it gives."""
        names = {f"output {name!r}": name for name in sorted(self.parts.facts.outputs)}

        def predict(variables, x, batch, at):
            leaves, frozen = variables
            outputs = self.outer.run_last(leaves, frozen, x, at, is_part=False)
            return {shown: outputs[name] for shown, name in names.items()}

        variables, run = draw_outer(self.parts, self.outer.last), self.placed(predict)
        rows = dict.fromkeys(names, int(self.parts.facts.time_major))
        steps, outputs = self.parts.facts.num_steps, self.parts.facts.outputs
        has_steps = {shown: steps == outputs[name].shape[0] for shown, name in names.items()}
        times = {shown: 0 if has else NOWHERE for shown, has in has_steps.items()}
        dims = {"row": self.dims["row"] | rows, "time": self.dims["time"] | times}
        return Part("`predict`", run, variables, self.draw_y, dims, run)

    def draw_y(self) -> Tree:
        """What the last layer may give."""
        return {"x": self.random_x(), "batch": self.batch}

    # ---- the experiments ----

    def run(self, part: Part, inputs: Tree, key: Any, row: int = 0, time: int = 0) -> Tree:
        """What a part gives for all rows."""
        args = part.variables, inputs, row, time, key
        return naming_errors(
            part.what.strip("`"), lambda: jax.device_get(call_once(self.jitted(part.run), *args))
        )

    def pieces(self, part: Part, inputs: Tree, along: str, size: int, key: Any) -> list[Tree]:
        """What a part gives for so many rows, or time steps, after the other."""
        run = functools.partial(call_once, self.jitted(part.piece), part.variables)
        return jax.device_get(self.run_in_pieces(run, part, inputs, along, size, key))

    def run_in_pieces(
        self, run: Callable[..., Tree], part: Part, inputs: Tree, along: str, size: int, key: Any
    ) -> list[Tree]:
        """The same, of a function (inputs, row, time, key).

        Args:
          along: "row" or "time".
        """
        found = list[Tree]()
        for start in range(0, self.sizes[along], size):
            own = part.take(along, start, start + size, inputs)
            if along == "time" and "carry" in own and found:
                own["carry"] = found[-1]["carry"]
            place = (start, 0) if along == "row" else (0, start)
            found.append(run(own, *place, key))
        return found

    # ---- what they need ----

    def placed(self, function: Callable[..., Tree]) -> Callable[..., Tree]:
        """A function (variables, at=..., and inputs by name) as that of a `Part`."""

        def run(variables, inputs, row, time, key):
            facts = self.parts.facts
            at = facts.at(facts.to_block(inputs["batch"]), draws=False)
            at = at._replace(row=jnp.int32(row), time=jnp.int32(time), key=key)
            return function(variables, **inputs, at=at)

        return run

    def random_x(self) -> Arrays:
        """Rows that differ in their means, too: statistics of many equal places would hardly differ."""

        def draw(shape: Any, dim: int) -> np.ndarray:
            kept = {dim, len(shape.shape) - 1}
            means = [size if number in kept else 1 for number, size in enumerate(shape.shape)]
            return self.random(shape) + self.random(jax.ShapeDtypeStruct(means, shape.dtype))

        return jax.tree.map(draw, self.x, self.dims["row"]["x"])

    def random(self, shape: Any) -> np.ndarray:
        """Normal numbers."""
        return normal(self.rng, shape)


def normal(rng: np.random.Generator, shape: Any) -> np.ndarray:
    """Normal numbers of a shape and dtype; both parts of complex numbers."""
    numbers = rng.standard_normal(shape.shape)
    if jnp.issubdtype(shape.dtype, jnp.complexfloating):
        numbers = numbers + 1j * rng.standard_normal(shape.shape)
    return numbers.astype(shape.dtype)


def quick_jit(parts: Parts, function: Function) -> Function:
    """`jax.jit` of a function of arrays, for what runs a few times: a CPU compiles good code far longer."""
    if axes := parts.facts.task.axes:  # which a layer may use by their names: of size 1
        mesh = jax.make_mesh((1,) * len(axes), axes, devices=jax.local_devices()[:1])
        of_one: Any = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
        plain = jax.shard_map(lambda args: inner(*args), **of_one)
        inner, function = function, lambda *args: plain(args)
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    is_cpu = jax.default_backend() == "cpu"
    return jax.jit(function, compiler_options=quick if is_cpu else None)


def draw_outer(parts: Parts, numbers: Sequence[Sequence[int]]) -> Arrays:
    """Variables outside of the layers, by their numbers; the compiler leaves out all others."""

    def draw() -> Arrays:
        _, *states = parts.facts.split(parts.storage.make(0))
        leaves = map(jax.tree.leaves, states)
        return [[own[n] for n in of] for own, of in zip(leaves, numbers, strict=True)]

    return call_once(quick_jit(parts, draw))


def _rows_of(task: Task, example: Shapes, num_rows: int) -> tuple[Arrays, Arrays]:
    """So many rows, one after the other from the first batches of training; and special whole numbers.

    A task that makes its own example is not asked for its data.

    Returns:
      a batch; and a tree as that, of whole numbers that may say that a place does not count: -1, 0, and the
      smallest and the largest that was seen. There are none of other arrays, and of those that jaxpar reads.
    """
    found = []
    if type(task).example_batch is Task.example_batch:
        found = [*map(_padded_first, _first_batches(task.make_batches("train", 0)))]
    wanted = jax.tree.map(lambda a: np.shape(a)[1:], example)
    is_like = [jax.tree.map(lambda a: np.shape(a)[1:], batch) == wanted for batch in found]
    found = [*itertools.compress(found, is_like)] or [_padded_first(task.example_batch())]

    def rows(*arrays: Arrays) -> Arrays:
        if not np.ndim(arrays[0]):
            return arrays[0]
        return np.stack([arrays[row % len(arrays)][row] for row in range(num_rows)])

    def special(path: Any, *arrays: Arrays) -> np.ndarray:
        dtype, name = np.asarray(arrays[0]).dtype, name_of(path)
        if (
            dtype.kind not in "iub"
            or name in PARTS
            or not (np.ndim(arrays[0]) and np.size(arrays[0]))
        ):
            return np.zeros(0, dtype)
        ends = min(map(np.min, arrays)), max(map(np.max, arrays))
        return np.array([*dict.fromkeys(([-1] if dtype.kind == "i" else []) + [0, *ends])], dtype)

    return jax.tree.map(rows, *found), jax.tree.map_with_path(special, *found)


def _first_batches(batches: Any) -> Iterator[Any]:
    """The first batches, copied: a stream may use its arrays again."""
    for step in range(min(BATCHES, batches.num_windows or BATCHES)):
        try:
            batch = batches.batch(step)  # rows with padding may come later
        except EndOfStreamError:
            return
        yield jax.tree.map(np.asarray, owned(batch))


def _padded_first(batch: Batch) -> Arrays:
    """A batch whose first rows are those that end with padding, if it says which do."""
    lengths_B = part_of(batch, LENGTHS)
    if lengths_B is None:
        return batch
    lengths_B = np.asarray(lengths_B)
    steps = max(time_steps(batch, 1).values(), default=0)
    order = np.argsort((lengths_B == 0) | (lengths_B >= steps), kind="stable")
    return jax.tree.map(lambda a: np.asarray(a)[order] if np.ndim(a) else a, batch)


def name_of(path: Any) -> str:
    """The last name of a path."""
    return jax.tree_util.keystr(path[-1:], simple=True)


def _dim_of_rows(shape: Any, of_twice: Any) -> int:
    """The dim that differs between the shapes of what is made of some rows and of twice as many."""
    sizes = enumerate(zip(shape.shape, of_twice.shape, strict=True))
    return next((dim for dim, (a, b) in sizes if a != b), NOWHERE)
