"""Whether a model gives the same numbers however a batch is cut: its parts are run on few rows, and compared.

A step gives each device, and each microbatch, some of the rows, and each chunk of time some of the steps.
Some models would give another loss on every mesh then, and no error: those that mix rows, as a norm by the
statistics of a batch or a mean over the places that count, or that draw the same random numbers for every
block. They are found before a run. `first`, each kind of layer, and `last` or `predict` are run by
themselves, in three ways:

- Inputs are replaced or moved, and what must not depend on that is compared. Where a row is replaced, the
  others must give the same bits. Where all rows move to other places, and `at.row` with them, they must give
  the same numbers. A layer that says how many rows it mixes is left out.
- Inputs are cut along a dim. The pieces, one after the other, must give what the whole gives, and their sums
  must add up: halves of the rows, and where a run has them its chunks of time.
- Padding is replaced, where a batch says what is padding (`lengths`). Real steps must give the same numbers.

Each is done with a key, as in training. Where something is wrong and without a key it is not, random numbers
are to blame, and the error says so. Those that depend on how time is cut are looked for only in runs with
chunks of time, also when a run is resumed with them: without chunks they are the same on any mesh.

A layer whose state goes on where the batch says that another sequence begins (`resets`) is warned of.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.base.keys import new_key
from jaxpar.base.parts import LENGTHS, PARTS, RESETS, part_of, with_part
from jaxpar.data.batches import EndOfStreamError
from jaxpar.model.model import checked_sums
from jaxpar.model.task import Task
from jaxpar.model.tracing import made, naming_errors
from jaxpar.step.parts import Outer, Parts

_log = logging.getLogger(__name__)

ROWS = 4  # two in each half
BATCHES = 4  # from whose first rows they are taken

# How far two halves of a sum may be from the whole, relative to their sizes: a million float32 numbers in
# another order are off by a tenth of it. Sums in fewer digits may be off by a few units in the last.
TOLERANCE, UNITS = 1e-5, 4
# Random inputs on which pieces must be wrong. Once in thousands, two scores tie: then rounding decides
# which is the largest, and whether a prediction counts as right.
TRIES = 3

# How far a window may be from its chunks, relative to the largest number: a state of float32 is rounded
# in another order, and a loop over time adds to that.
OVER_TIME = 1e-3

FAR = 10.0  # the size of numbers in place of padding: a mean over many steps must change by them

_NOWHERE = -1  # the dim of rows, or of time, of an array that has none
_DRAW = "at.draw(jax.random.normal, x.shape)"

Tree = dict[str, Any]


def check_rows_alone(parts: Parts, *, predicts: bool = False) -> None:
    """Checks that no row of a batch depends on another, by running parts of the model on random numbers.

    Each part is drawn and run by itself on one device, in its real size, on few rows; once for these facts.

    Args:
      predicts: whether the model's `predict` is looked at, instead of its `last`.
    Raises:
      ValueError: `first`, a layer, `last` or `predict` mixes rows, its random numbers depend on how a batch
        is cut, or its sums do not add up. It reads padding. Or, where the layout cuts windows into chunks of
        time, it gives something else for these.
    """
    num_rows = min(ROWS, parts.facts.batch_size) // 2 * 2
    chunks = 1 if predicts else parts.partition.parallel.num_chunks
    if num_rows and ("rows", predicts, chunks) not in parts.facts.checked:
        trial = Trial(parts, num_rows, chunks, predicts=predicts)
        for make in trial.makers.values():
            trial.check(make())
        parts.facts.checked.add(("rows", predicts, chunks))


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

    def map(self, along: str, change: Callable[..., Any], *trees: Tree) -> Tree:
        """Inputs or outputs, but sums, with all arrays changed that have such a dim.

        Args:
          change: (dim, arrays, one of each tree) -> array. Of arrays without the dim, that of the last tree
            is taken.
        """

        def of(dim: int, *arrays: Any) -> Any:
            return arrays[-1] if dim == _NOWHERE else change(dim, *arrays)

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
      splits_time: whether axes of the task's own do.
      key: of random numbers in training; None for predictions.
    """

    def __init__(self, parts: Parts, num_rows: int, num_chunks: int, *, predicts: bool = False):
        """Looks at `first`, which tells the shapes of x."""
        self.parts, self.num_rows, self.num_chunks = parts, num_rows, num_chunks
        self.batch, self.special = batch, _ = _rows_of(parts.facts.task, num_rows)
        self.jitted = functools.cache(functools.partial(quick_jit, parts))
        facts, sizes = parts.facts, parts.partition.parallel.mesh.sizes
        self.sizes = {"row": num_rows, "time": facts.num_steps or 0}
        self.splits_time = any(sizes[axis] > 1 for axis in facts.time_axes)
        self.key = None if predicts else new_key(0)
        self.outer = Outer(parts, parts.abstract_model(), predicts=predicts)
        self.rng = np.random.default_rng(0)

        def first(variables, batch, at):
            leaves, frozen = variables
            return {"output": self.outer.run_first(leaves, frozen, at)}

        variables, run = draw_outer(parts, self.outer.first), self.placed(first)
        twice = jax.tree.map(lambda a: np.concatenate([a, a]) if np.ndim(a) else a, batch)

        def shape_of_x(batch: Any) -> Any:
            args = variables, {"batch": batch}, 0, 0, None
            return naming_errors("first", lambda: jax.eval_shape(self.jitted(run), *args)["output"])

        self.x, x_of_twice = map(shape_of_x, (batch, twice))
        rows, steps = jax.tree.map(_dim_of_rows, self.x, x_of_twice), parts.facts.num_steps

        def of_time(dim: int, a: Any) -> int:
            return dim if steps and np.shape(a)[dim : dim + 1] == (steps,) else _NOWHERE

        times = jax.tree.map(functools.partial(of_time, 0), self.x)
        self.dims = {
            "row": dict.fromkeys(("x", "output", "gradient"), rows)
            | {"batch": jax.tree.map(lambda a: 0 if np.ndim(a) else _NOWHERE, batch)},
            "time": dict.fromkeys(("x", "output", "gradient"), times)
            | {"batch": jax.tree.map(functools.partial(of_time, 1), batch)},
        }
        inputs = {"batch": batch}
        part = Part("`first`", run, variables, lambda: inputs, self.dims, run)
        layers = enumerate(facts.kinds)
        self.makers: dict[str, Callable[[], Part]] = {
            part.what: lambda: part,
            **{f"layer {name}": functools.partial(self.layer, n) for n, name in layers},
            **({"`predict`": self.predict} if predicts else {"`last`": self.last}),
        }

    # ---- the parts ----

    def layer(self, kind: int) -> Part:
        """A layer of a kind: what it returns, the state that it leaves, and the sums that it adds."""
        facts = self.parts.facts
        name, number = facts.kinds[kind], facts.kind_of.index(kind)
        maker, like = facts.model.layers.maker(number), facts.traces.layers[kind][1][2]

        @functools.partial(quick_jit, self.parts)
        def draw():
            layer = made(maker, 0)
            begins = hasattr(layer, "initial_carry")
            return nnx.split(layer), layer.initial_carry(self.num_rows) if begins else ()

        def layer(variables, carry, x, batch, at):
            def run(_, __, *args):
                return nnx.merge(*variables)(*args)

            at = at._replace(layer=jnp.int32(number))
            after, y, *sums = self.parts.run_padded(run, like, (), (), carry, x, at)
            own = {"sums": checked_sums(sums[0], f"layer {name}")} if sums else {}
            return {"output": y, "carry": after, **own}

        variables, start = draw()
        run = self.placed(layer)
        # Not below where it starts: a state may be a divisor.
        carry = jax.tree.map(lambda a: a + abs(self.random(a)), jax.device_get(start))
        in_carry = {"row": 0, "time": _NOWHERE}
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
                lambda d, dim: 0.0 if dim == _NOWHERE else d, found, self.dims["row"]["x"]
            )
            return {"gradient": found, **out}

        variables = draw_outer(self.parts, self.outer.last)
        run, piece = map(self.placed, (with_gradients, last))
        return Part("`last`", run, variables, self.draw_y, self.dims, piece)

    def predict(self) -> Part:
        """By all that it gives."""
        names = {f"output {name!r}": name for name in sorted(self.parts.facts.outputs)}

        def predict(variables, x, batch, at):
            leaves, frozen = variables
            outputs = self.outer.run_last(leaves, frozen, x, at, is_part=False)
            return {shown: outputs[name] for shown, name in names.items()}

        variables, run = draw_outer(self.parts, self.outer.last), self.placed(predict)
        rows = dict.fromkeys(names, int(self.parts.facts.time_major))
        times = dict.fromkeys(names, 0 if self.parts.facts.num_steps else _NOWHERE)
        dims = {"row": self.dims["row"] | rows, "time": self.dims["time"] | times}
        return Part("`predict`", run, variables, self.draw_y, dims, run)

    def draw_y(self) -> Tree:
        """What the last layer may give."""
        return {"x": self.random_x(), "batch": self.batch}

    # ---- the experiments ----

    def check(self, part: Part) -> None:
        """Does all of them.

        Raises:
          ValueError: the part gives something else than it must.
        """
        steps, carry = self.parts.facts.num_steps, part.draw().get("carry", ())
        if not part.mixes:
            self.check_sums(part)
            self.check_rows(part)
        lengths_B = part_of(self.batch, LENGTHS)
        if steps and lengths_B is not None and (lengths_B < steps).any():
            self.check_padding(part, np.arange(steps) < np.asarray(lengths_B)[:, None])
        if steps and self.num_chunks > 1:
            self.check_chunks(part, steps // self.num_chunks)
        if self.splits_time and self.key is not None:
            # What reads other steps changes in any case: only what is drawn can be judged.
            moved = functools.partial(self.moved, part, part.draw(), "time", same=_same)
            if moved(self.key) and not moved(None):
                self.refuse(part, moved, "")
        if jax.tree.leaves(carry) and part_of(self.batch, RESETS) is not None:
            self.look_at_resets(part)

    def check_rows(self, part: Part) -> None:
        """Replaces a row of the inputs, by another one or NaN, and looks at the others; then moves all rows.

        Raises:
          ValueError: they change.
        """
        inputs, last = part.draw(), self.num_rows - 1
        whole = self.run(part, inputs, self.key)
        again = self.run(part, inputs, self.key)
        if name := _unlike(whole, again, _near):
            raise ValueError(
                f"{part.what} gives other numbers each time it is called with the same inputs: its {name} "
                f"differs.\nFix: draw random numbers by {_DRAW}"
            )
        same = _near if _unlike(whole, again, _same) else _same
        for row, by_nan in itertools.product((0, last), (False, True)):
            others = functools.partial(
                part.map, "row", lambda dim, a, row=row: np.delete(a, row, dim)
            )
            own = part.map("row", functools.partial(_replace, row=row, by_nan=by_nan), inputs)
            found = self.run(part, self.with_special(own, row) if by_nan else own, self.key)
            if name := _unlike(others(whole), others(found), same):
                raise ValueError(
                    f"{part.what} mixes the rows of a batch: where row {row} of its input is replaced, "
                    f"its {name} changes in others, too.\nFix: {_ALONE[name == 'gradient']}"
                )

        moved = functools.partial(self.moved, part, inputs, "row")
        if moved(self.key, _same):
            same = _near if moved(None, _same) else _same  # where rounding depends on the place
            self.refuse(
                part,
                functools.partial(moved, same=same),
                "{what} gives a row other numbers at another place in its block: {wrong}.\nFix: count rows "
                f"from at.row, or draw random numbers by {_DRAW}",
            )

    def moved(
        self, part: Part, inputs: Tree, along: str, key: Any, same: Callable[..., bool]
    ) -> str | None:
        """What changes where the first half of the rows, or time steps, follows the second, in words."""
        half = self.sizes[along] // 2
        own = part.map(along, lambda dim, a: np.roll(a, -half, dim), inputs)
        found = self.run(part, own, key, **{along: half})
        pair = (
            part.take(along, half, 2 * half, self.run(part, inputs, key)),
            part.take(along, 0, half, found),
        )
        name = _unlike(*pair, same)
        return name and f"its {name} changes where its block begins with {along} {half}"

    def check_sums(self, part: Part) -> None:
        """Compares sums of some rows with those of two halves of them; also where whole numbers are special.

        Raises:
          ValueError: the halves' do not add up to the whole's.
        """
        half, words = self.num_rows // 2, ("some rows", "the two halves of them")

        def halves(key: Any, rows: Sequence[int] = ()) -> str | None:
            inputs = functools.reduce(self.with_special, rows, part.draw())
            whole = self.run(part, inputs, key)
            if "sums" not in whole:
                return None
            pieces = self.pieces(part, inputs, "row", half, key)
            return _not_added(whole, *pieces, of=words)

        message = (
            "the sums of {what} do not add up: {wrong}.\nFix: return sums over rows, no means, or multiply "
            "what counts once, such as a penalty on parameters, by the weight"
        )
        self.refuse(part, halves, message)
        if any(special.size for special in jax.tree.leaves(self.special)):
            self.refuse(part, functools.partial(halves, rows=range(half)), message)

    def check_padding(self, part: Part, is_real_BT: np.ndarray) -> None:
        """Replaces padding: of the batch before the layers, of their inputs after it; looks at real steps.

        In a batch, labels or a mask may say what is padding to those that come later.

        Raises:
          ValueError: these change.
        """

        def padded(tree: Tree, name: str, other: Callable[[Any], Any]) -> Any:
            def of(path: Any, a: Any, row: int, time: int) -> Any:
                has_meaning = name == "batch" and (_name_of(path) in PARTS or a.dtype == bool)
                if _NOWHERE in (row, time) or has_meaning:
                    return a
                is_real = is_real_BT if row < time else is_real_BT.T
                return np.where(np.expand_dims(is_real, (*range(2, np.ndim(a)),)), a, other(a))

            dims = (part.dims[along][name] for along in ("row", "time"))
            return jax.tree.map_with_path(of, tree[name], *dims)

        def other(a: Any) -> Any:
            if jnp.issubdtype(a.dtype, jnp.floating):
                return (FAR * self.random(a)).astype(a.dtype)
            return self.rng.choice(np.ravel(a), np.shape(a))

        def finds(key: Any) -> str | None:
            inputs, name = part.draw(), "x" if "x" in part.draw() else "batch"
            own = inputs | {name: padded(inputs, name, other)}
            both = [self.run(part, each, key) for each in (inputs, own)]
            names = both[0].keys() - {"carry", "sums"}
            one, two = ({n: padded(each, n, np.zeros_like) for n in names} for each in both)
            if name := _unlike(one, two, _near):
                return f"its {name} changes"
            return _not_added(*both, of=("one padding", "another")) if "sums" in both[0] else None

        self.refuse(
            part,
            finds,
            "{what} gives real steps other numbers where padding is replaced: {wrong}.\nFix: mask steps "
            "from at.lengths on, by jaxpar.nn.mask_padding(x, at) or by a weight of 0",
        )

    def check_chunks(self, part: Part, length: int) -> None:
        """Compares what a part gives for a window with what it gives for its chunks.

        Raises:
          ValueError: they are not the same.
        """

        def chunks(key: Any) -> str | None:
            inputs = part.draw()
            whole = self.run(part, inputs, key)
            pieces = self.pieces(part, inputs, "time", length, key)
            joined = part.map("time", lambda dim, *of: np.concatenate(of, dim), *pieces)
            if name := _unlike(joined, whole, _near):
                return f"its {name} is another one"
            if "sums" not in whole:
                return None
            return _not_added(whole, *pieces, of=("the window", "its chunks"))

        self.refuse(
            part,
            chunks,
            "{what} gives something else where its window is cut into "
            f"{self.num_chunks} chunks of time: {{wrong}}.\nFix: keep what lasts in a layer's carry and "
            "count steps from at.time, or use num_chunks=1, and say whole_window = True in the layer",
        )

    def look_at_resets(self, part: Part) -> None:
        """Warns of a layer whose state goes on where the batch says that another sequence begins."""
        resets = np.array(part_of(self.batch, RESETS))
        resets[:, 0] = 1
        inputs = part.draw() | {"batch": with_part(self.batch, RESETS, resets)}
        other = inputs | {"carry": jax.tree.map(lambda a: a + 1, inputs["carry"])}
        one, two = ({"y": self.run(part, own, self.key)["output"]} for own in (inputs, other))
        if _unlike(one, two, _near) and jax.process_index() == 0:
            _log.warning(
                "%s does not heed the batch's %r: its state goes on from sequence to sequence; let it begin "
                "from its initial state where at.resets says so, or leave %r out of the batch",
                *(part.what, RESETS, RESETS),
            )

    def run(self, part: Part, inputs: Tree, key: Any, row: int = 0, time: int = 0) -> Tree:
        """What a part gives for all rows."""
        args = part.variables, inputs, row, time, key
        return naming_errors(
            part.what.strip("`"), lambda: jax.device_get(self.jitted(part.run)(*args))
        )

    def pieces(self, part: Part, inputs: Tree, along: str, size: int, key: Any) -> list[Tree]:
        """What a part gives for so many rows, or time steps, after the other."""
        run = functools.partial(self.jitted(part.piece), part.variables)
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

    def refuse(self, part: Part, find: Callable[[Any], str | None], message: str) -> None:
        """Does an experiment with random numbers, and says what it has found.

        Args:
          find: key -> what is wrong, or None.
          message: of an error, but for {what} and {wrong}.
        Raises:
          ValueError: something is wrong, each time that it is tried.
        """
        wrong = None
        for _ in range(TRIES):
            if (wrong := find(self.key)) is None:
                return
        if self.key is not None and find(None) is None:
            message = (
                "{what} draws random numbers that depend on how a batch is cut: {wrong}.\nFix: "
                f"{_DRAW} in place of jax.random.normal(at.key, x.shape)"
            )
        raise ValueError(message.format(what=part.what, wrong=wrong))

    # ---- what they need ----

    def placed(self, function: Callable[..., Tree]) -> Callable[..., Tree]:
        """A function (variables, at=..., and inputs by name) as that of a `Part`."""

        def run(variables, inputs, row, time, key):
            facts = self.parts.facts
            at = facts.at(facts.to_block(inputs["batch"]), draws=False)
            at = at._replace(row=jnp.int32(row), time=jnp.int32(time), key=key)
            return function(variables, **inputs, at=at)

        return run

    def with_special(self, inputs: Tree, row: int) -> Tree:
        """Inputs with special whole numbers in a row of the batch, in another row with another one first."""

        def fill(array: Any, special: np.ndarray) -> Any:
            if not special.size:
                return array
            filled = np.array(array)
            filled[row] = np.resize(np.roll(special, -row), filled[row].shape)
            return filled

        return inputs | {"batch": jax.tree.map(fill, inputs["batch"], self.special)}

    def random_x(self) -> Any:
        """Rows that differ in their means, too: statistics of many equal places would hardly differ."""

        def draw(shape: Any, dim: int) -> np.ndarray:
            kept = {dim, len(shape.shape) - 1}
            means = [size if number in kept else 1 for number, size in enumerate(shape.shape)]
            return self.random(shape) + self.rng.standard_normal(means).astype(shape.dtype)

        return jax.tree.map(draw, self.x, self.dims["row"]["x"])

    def random(self, shape: Any) -> np.ndarray:
        """Normal numbers."""
        return self.rng.standard_normal(shape.shape).astype(shape.dtype)


def quick_jit(parts: Parts, function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` of a function of arrays, for what runs a few times: a CPU compiles good code far longer."""
    if axes := parts.facts.task.axes:  # which a layer may use by their names: of size 1
        mesh = jax.make_mesh((1,) * len(axes), axes, devices=jax.local_devices()[:1])
        of_one: Any = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
        plain = jax.shard_map(lambda args: inner(*args), **of_one)
        inner, function = function, lambda *args: plain(args)
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    is_cpu = jax.default_backend() == "cpu"
    return jax.jit(function, compiler_options=quick if is_cpu else None)


def draw_outer(parts: Parts, numbers: Sequence[Sequence[int]]) -> Any:
    """Variables outside of the layers, by their numbers; the compiler leaves out all others."""

    def draw() -> Any:
        _, *states = parts.facts.split(parts.storage.make(0))
        leaves = map(jax.tree.leaves, states)
        return [[own[n] for n in of] for own, of in zip(leaves, numbers, strict=True)]

    return quick_jit(parts, draw)()


# What to do where rows mix: in what a part gives, or in the gradient of the loss.
_ALONE = (
    "compute each row from itself alone, as nnx.LayerNorm does, or say how many rows a layer mixes "
    "(rows_together = 8)",
    "return sums over rows, no means over the rows or places that count",
)


def _rows_of(task: Task, num_rows: int) -> tuple[Any, Any]:
    """So many rows, one after the other from the first batches of training; and special whole numbers.

    A task that makes its own example is not asked for its data.

    Returns:
      a batch; and a tree as that, of whole numbers that may say that a place does not count: -1, 0, and the
      smallest and the largest that was seen. There are none of other arrays, and of those that jaxpar reads.
    """
    if type(task).example_batch is Task.example_batch:
        found = [*_first_batches(task.make_batches("train", 0))]
    else:
        found = [task.example_batch()]
    found = [_padded_first(batch) for batch in found]
    shapes = [jax.tree.map(lambda a: np.shape(a)[1:], batch) for batch in found]
    found = [own for own, shape in zip(found, shapes, strict=True) if shape == shapes[0]]

    def rows(*arrays: Any) -> Any:
        if not np.ndim(arrays[0]):
            return arrays[0]
        return np.stack([arrays[row % len(arrays)][row] for row in range(num_rows)])

    def special(path: Any, *arrays: Any) -> np.ndarray:
        dtype, name = np.asarray(arrays[0]).dtype, _name_of(path)
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
        yield jax.tree.map(np.array, batch)


def _padded_first(batch: Any) -> Any:
    """A batch whose first rows are those that end with padding, if it says which do."""
    lengths_B = part_of(batch, LENGTHS)
    if lengths_B is None:
        return batch
    lengths_B = np.asarray(lengths_B)
    steps = max((a.shape[1] for a in jax.tree.leaves(batch) if np.ndim(a) > 1), default=0)
    order = np.argsort((lengths_B == 0) | (lengths_B >= steps), kind="stable")
    return jax.tree.map(lambda a: np.asarray(a)[order] if np.ndim(a) else a, batch)


def _name_of(path: Any) -> str:
    """The last name of a path."""
    return jax.tree_util.keystr(path[-1:], simple=True)


def _replace(dim: int, array: Any, row: int, by_nan: bool) -> Any:
    """With another row in place of one; or NaN if it is of floating-point numbers."""
    rows = np.moveaxis(np.array(array), dim, 0)
    is_nan = by_nan and jnp.issubdtype(rows.dtype, jnp.floating)
    rows[row] = np.nan if is_nan else rows[len(rows) - 1 - row]
    return np.moveaxis(rows, 0, dim)


def _unlike(outputs: Tree, others: Tree, same: Callable[[Any, Any], bool]) -> str | None:
    """The name of the first output, but sums, that is not the same in both; None if all are."""
    for name in outputs:
        both = jax.tree.leaves(outputs[name]), jax.tree.leaves(others[name])
        if name != "sums" and not all(itertools.starmap(same, zip(*both, strict=True))):
            return name
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether all bits are the same."""
    return a.tobytes() == b.tobytes()


def _near(a: Any, b: Any) -> bool:
    """Whether arrays are the same up to rounding over time."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return _same(a, b)
    tolerance = max(OVER_TIME, UNITS * float(jnp.finfo(a.dtype).eps))
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.allclose(a, b, 0, tolerance * np.nanmax(abs(a), initial=0), True)


def _dim_of_rows(shape: Any, of_twice: Any) -> int:
    """The dim that differs between the shapes of what is made of some rows and of twice as many."""
    sizes = enumerate(zip(shape.shape, of_twice.shape, strict=True))
    return next((dim for dim, (a, b) in sizes if a != b), _NOWHERE)


def _rounding(*numbers: float) -> float:
    """The last digit, relative to its number, of the type of fewest digits that has all of these."""
    if all(n.is_integer() and abs(n) <= 256 for n in numbers):  # every type has these
        return 0.0
    types = jnp.bfloat16, jnp.float16, jnp.float32
    fits = (t for t in types if all(float(np.asarray(n).astype(t)) == n for n in numbers))
    return float(jnp.finfo(next(fits, jnp.float32)).eps)


def _not_added(whole: Tree, *pieces: Tree, of: tuple[str, str]) -> str | None:
    """The first of a whole's sums that is not the sum of those of its pieces, in words; None if all are.

    Args:
      of: the words for the whole and for its pieces.
    """
    for name, number in whole["sums"].by_name.items():
        parts = [float(piece["sums"].by_name[name]) for piece in pieces]
        tolerance = max(TOLERANCE, UNITS * _rounding(float(number), *parts))
        if abs(float(number) - sum(parts)) > tolerance * sum(map(abs, parts)):
            each = " and ".join(f"{part:.6g}" for part in parts)
            return f"its {name} is {float(number):.6g} for {of[0]}, and {each} for {of[1]}"
    return None
