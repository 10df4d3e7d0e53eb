"""Whether each row of a batch stands alone: what a model makes of it must not depend on the others.

A step gives each device, and each microbatch, some of the rows. What mixes rows, as a norm by the statistics
of a batch or a loss that balances a batch do, would give another loss on every mesh, and no error. It is
found before a run, on a few rows: where one of them is replaced, `first`, each kind of layer and `predict`
must give the same bits for all others (a layer that says how many rows it mixes is called for so many); and
what `last` gives for two halves must add up to what it gives for the whole.

Chunks of time are the same for time: where windows are cut into them, `first`, each kind of layer and `last`
must give for all chunks, one after the other, what they give for the window.

A layer whose state goes on where the batch says that another sequence begins (`resets`) is warned of.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.base.at import At
from jaxpar.base.parts import RESETS, part_of, with_part
from jaxpar.facts import named
from jaxpar.layout import Layout, Outer
from jaxpar.model import Sums, checked_sums, made

_log = logging.getLogger(__name__)

ROWS = 4  # two in each half

# How far two halves of a sum may be from the whole, relative to their sizes: a million float32 numbers in
# another order are off by a tenth of it. Sums in fewer digits may be off by a few units in the last.
TOLERANCE, UNITS = 1e-5, 4
# Random inputs on which the sums must be wrong. Once in thousands, two scores tie: then rounding decides
# which is the largest, and whether a prediction counts as right.
TRIES = 3

# How far a window may be from its chunks, relative to the largest number: a state of float32 is rounded
# in another order, and a loop over time adds to that.
OVER_TIME = 1e-3

_NOWHERE = -1  # the dim of rows of an array that has none


def check_rows_alone(layout: Layout, *, predicts: bool = False) -> None:
    """Checks that no row of a batch depends on another, by running parts of the model on random numbers.

    Each part is drawn and run by itself on one device, in its real size, on few rows; once for these facts.

    Args:
      predicts: whether the model's `predict` is looked at, instead of its `last`.
    Raises:
      ValueError: `first`, a layer or `predict` mixes rows, or sums of `last` do not add up. Or, where the
        layout cuts windows into chunks of time, one of them gives something else for these.
    """
    batch = layout.task.example_batch()
    num_rows = min(ROWS, layout.facts.batch_size) // 2 * 2
    batch = jax.tree.map(lambda a: np.asarray(a)[:num_rows] if np.ndim(a) else a, batch)
    chunks = 1 if predicts else layout.parallel.num_chunks
    if num_rows and (predicts, chunks) not in layout.facts.rows_checked:
        trial = _Trial(layout, batch, num_rows, chunks, predicts=predicts)
        for kind in range(len(layout.facts.kinds)):
            trial.check_layer(kind)
        if predicts:
            trial.check_predict()
        else:
            trial.check_last()
        layout.facts.rows_checked.add((predicts, chunks))


class _Trial:
    """Parts of a model, run on few rows.

    Attributes:
      x: shapes of what goes through the layers.
      in_batch, in_x: trees of the dim of rows in each of their arrays.
    """

    def __init__(
        self, layout: Layout, batch: Any, num_rows: int, num_chunks: int, *, predicts: bool
    ):
        """Looks at `first`, which tells the shapes of x."""
        self.layout, self.batch = layout, batch
        self.num_rows, self.num_chunks = num_rows, num_chunks
        self.outer = Outer(layout, layout.abstract_model(), predicts=predicts)
        self.rng = np.random.default_rng(0)
        self.in_batch = jax.tree.map(lambda leaf: 0 if np.ndim(leaf) else _NOWHERE, batch)

        @self.quick_jit
        def first(variables, batch, time=0):
            leaves, frozen = variables
            return self.outer.run_first(leaves, frozen, self.at(batch, time=time))

        variables = self.draw_outer(self.outer.first)
        twice = jax.tree.map(lambda a: np.concatenate([a, a]) if np.ndim(a) else a, batch)
        sizes = (jax.eval_shape(first, variables, rows) for rows in (batch, twice))
        self.x, x_of_twice = named("first", lambda: tuple(sizes))
        self.in_x = jax.tree.map(_dim_of_rows, self.x, x_of_twice)
        run = functools.partial(first, variables)
        self.check_alone("first", run, (batch,), (self.in_batch,), {"output": self.in_x})
        self.check_chunks("`first`", lambda _, *inputs: ((), run(*inputs), []), (), batch)

    def check_layer(self, kind: int) -> None:
        """By what a layer of a kind returns, the state that it leaves, and the sums that it adds."""
        name, number = self.layout.facts.kinds[kind], self.layout.facts.kind_of.index(kind)
        maker = self.layout.facts.model.layers.maker(number)

        @self.quick_jit
        def draw():
            layer = made(maker, 0)
            begins = hasattr(layer, "initial_carry")
            return nnx.split(layer), layer.initial_carry(self.num_rows) if begins else ()

        like = self.layout.facts.traces.layers[kind][1][2]

        @self.quick_jit
        def layer(variables, carry, x, batch, row=0, time=0):
            def run(_, __, *args):
                return nnx.merge(*variables)(*args)

            at = self.at(batch, row, time, layer=number)
            after, y, *sums = self.layout.facts.run_padded(run, like, (), (), carry, x, at)
            return (after, y), [checked_sums(own, f"layer {name}") for own in sums]

        variables, start = draw()
        # Not below where it starts: a state may be a divisor.
        carry = jax.tree.map(lambda a: a + abs(self.random(a)), jax.device_get(start))
        in_carry, what = jax.tree.map(lambda _: 0, carry), f"layer {name}"
        dims = in_carry, self.in_x, self.in_batch

        def run(*inputs: Any) -> Any:
            return layer(variables, *inputs)[0]

        def sums(*inputs: Any, row: int = 0) -> Any:
            return layer(variables, *inputs, row)[1][0]

        def chunk(carry: Any, batch: Any, time: int, x: Any) -> Any:
            (after, y), sums = layer(variables, carry, x, batch, 0, time)
            return after, y, sums

        def draw_inputs() -> tuple[Any, ...]:
            return carry, self.random_x(), self.batch

        inputs = draw_inputs()
        if name not in self.layout.facts.rows_together:  # those are called for their rows alone
            self.check_alone(what, run, inputs, dims, {"carry": in_carry, "output": self.in_x})
            if self.layout.facts.adds_sums and layer(variables, *inputs)[1]:
                self.check_added(what, sums, sums, draw_inputs, dims)
        self.check_chunks(what, chunk, carry, self.batch, inputs[1])
        if jax.tree.leaves(carry) and part_of(self.batch, RESETS) is not None:
            self.look_at_resets(what, lambda *inputs: run(*inputs)[1], carry, inputs[1])

    def check_last(self) -> None:
        """By all sums; and by the gradients of the loss, in which no tolerance hides a mix."""

        def last(variables, y, batch, row=0, time=0):
            leaves, frozen = variables
            return self.outer.run_last(leaves, frozen, y, self.at(batch, row, time), is_part=False)

        def gradients_and_sums(variables, y, batch):
            def loss(y):
                sums = last(variables, y, batch)
                return sums.loss, sums

            found, sums = jax.grad(loss, has_aux=True)(y)
            # What has no rows is used by all: its gradient is a sum.
            return jax.tree.map(
                lambda d, dim: 0.0 if dim == _NOWHERE else d, found, self.in_x
            ), sums

        def draw_inputs() -> tuple[Any, ...]:
            return self.random_x(), self.batch

        variables, dims = self.draw_outer(self.outer.last), (self.in_x, self.in_batch)
        of_half = functools.partial(self.quick_jit(last), variables)
        of_whole = functools.partial(self.quick_jit(gradients_and_sums), variables)
        with jax.default_matmul_precision("float32"):  # whatever the size of a block
            self.check_added(
                "`last`", lambda *inputs: of_whole(*inputs)[1], of_half, draw_inputs, dims
            )
            gradients = {"gradient": self.in_x}
            self.check_alone(
                "last", lambda *inputs: of_whole(*inputs)[0], draw_inputs(), dims, gradients
            )

            def chunk(_: Any, batch: Any, time: int, y: Any) -> Any:
                return (), (), [of_half(y, batch, 0, time)]

            self.check_chunks("`last`", chunk, (), *draw_inputs()[::-1])

    def check_predict(self) -> None:
        """By all that it gives."""
        facts = self.layout.facts

        @self.quick_jit
        def predict(variables, y, batch):
            leaves, frozen = variables
            return self.outer.run_last(leaves, frozen, y, self.at(batch), is_part=False)

        run = functools.partial(predict, self.draw_outer(self.outer.last))
        dims = {f"output {name!r}": int(facts.time_major) for name in sorted(facts.outputs)}
        inputs = self.random_x(), self.batch
        self.check_alone("predict", run, inputs, (self.in_x, self.in_batch), dims)

    def check_added(
        self,
        what: str,
        of_whole: Callable[..., Sums],
        of_half: Callable[..., Sums],
        draw: Callable[[], tuple[Any, ...]],
        dims: tuple[Any, ...],
    ) -> None:
        """Compares sums of some rows with those of two halves of them, on inputs that are drawn.

        Args:
          of_whole: inputs -> the sums of all rows.
          of_half: (inputs, row=number of the first row) -> those of a half.
          dims: of rows, a tree as the inputs.
        Raises:
          ValueError: the halves' do not add up to the whole's.
        """
        half, wrong = self.num_rows // 2, None
        for _ in range(TRIES):
            inputs = draw()
            whole = named(what, lambda inputs=inputs: of_whole(*inputs))
            halves = [of_half(*_cut(inputs, dims, row, row + half), row=row) for row in (0, half)]
            words = "some rows", "the two halves of them"
            wrong = _not_added(*jax.device_get([whole, *halves]), of=words)
            if wrong is None:
                return
        raise ValueError(
            f"the sums of {what} do not add up: its {wrong}, and a step adds up what it gives for "
            f"the rows of each device and microbatch; let it return sums over rows, each computed "
            f"from one row alone: no means, and times the weight what counts once, such as a penalty "
            f"on parameters"
        )

    def check_chunks(
        self, what: str, run: Callable[..., Any], carry: Any, batch: Any, *x: Any
    ) -> None:
        """Compares what a part gives for a window with what it gives for its chunks, if it has several.

        Args:
          run: (carry, batch, its first step, *x) -> (carry, y, [sums]).
        Raises:
          ValueError: they are not the same.
        """
        steps = self.layout.facts.num_steps
        if not steps or self.num_chunks == 1:
            return
        in_batch = jax.tree.map(lambda a: 1 if np.shape(a)[1:2] == (steps,) else _NOWHERE, batch)
        in_x = jax.tree.map(lambda a: 0 if a.shape[:1] == (steps,) else _NOWHERE, self.x)
        after, y, sums = jax.device_get(run(carry, batch, 0, *x))
        ys, sums_of_chunks, length = [], [], steps // self.num_chunks
        for start in range(0, steps, length):
            stop = start + length
            cut = (
                _cut(batch, in_batch, start, stop),
                start,
                *(_cut(a, in_x, start, stop) for a in x),
            )
            carry, *of_chunk = jax.device_get(run(carry, *cut))
            ys.append(of_chunk[0])
            sums_of_chunks += of_chunk[1]

        def join(dim: int, *parts: np.ndarray) -> np.ndarray:
            return parts[0] if dim == _NOWHERE else np.concatenate(parts)

        wrong = None
        if not _near(y, jax.tree.map(join, in_x if jax.tree.leaves(y) else (), *ys)):
            wrong = "its output is another one"
        elif not _near(after, carry):
            wrong = "the carry that it leaves is another one"
        elif sums:
            wrong = _not_added(sums[0], *sums_of_chunks, of=("the window", "its chunks"))
        if wrong:
            raise ValueError(
                f"{what} gives something else where its window is cut into {self.num_chunks} chunks of "
                f"time: {wrong}. What lasts from chunk to chunk is a layer's carry, at.time is the first "
                f"step of a block, and sums are over steps; a layer that needs all steps at once says "
                f"whole_window = True. Or use num_chunks=1"
            )

    def look_at_resets(self, what: str, run: Callable[..., Any], carry: Any, x: Any) -> None:
        """Warns of a layer whose state goes on where the batch says that another sequence begins.

        Args:
          run: (carry, x, batch) -> the layer's output.
        """
        resets = np.array(part_of(self.batch, RESETS))
        resets[:, 0] = 1
        batch = with_part(self.batch, RESETS, resets)
        other = jax.tree.map(lambda a: a + 1, carry)
        found = (jax.device_get(run(own, x, batch)) for own in (carry, other))
        if not _near(*found) and jax.process_index() == 0:
            _log.warning(
                "%s does not heed the batch's %r: its state goes on from sequence to sequence; let it begin "
                "from its initial state where at.resets says so, or leave %r out of the batch",
                *(what, RESETS, RESETS),
            )

    def check_alone(
        self,
        what: str,
        run: Callable[..., Any],
        inputs: tuple[Any, ...],
        dims: Any,
        outputs: dict[str, Any],
    ) -> None:
        """Runs something with a row of its inputs replaced, by another one or NaN, and looks at the others.

        Args:
          dims: of rows, a tree as the inputs.
          outputs: the dims of rows of what it returns, by the names of its parts.
        Raises:
          ValueError: they change.
        """

        def results(row: int | None = None, *, by_nan: bool = False) -> list[np.ndarray]:
            replace = functools.partial(_replace, row=row, by_nan=by_nan)
            return jax.tree.leaves(jax.device_get(run(*jax.tree.map(replace, inputs, dims))))

        whole, last = named(what, results), self.num_rows - 1
        parts = [(name, dim) for name, own in outputs.items() for dim in jax.tree.leaves(own)]
        repeats = all(map(_same, whole, results()))  # else NaN alone tells what depends on what
        for row, by_nan in [(0, False), (last, False), (0, True), (last, True)]:
            found = results(row, by_nan=by_nan)
            for (name, dim), *both in zip(parts, whole, found, strict=True):
                others = [np.delete(a, row, dim) if dim != _NOWHERE else a for a in both]
                if not _same(*(others if repeats else map(np.isnan, others))):
                    raise ValueError(
                        f"{what} mixes the rows of a batch: where row {row} of its input is replaced, its "
                        f"{name} changes in others, too. A step gives each device and microbatch only some "
                        f"rows, so the loss would depend on the mesh; compute each row from itself alone, "
                        f"with a norm over features (nnx.LayerNorm, nnx.RMSNorm), not over the batch, or let "
                        f"a layer say how many rows it mixes (rows_together = 8)"
                    )

    def at(self, batch: Any, row: Any = 0, time: Any = 0, layer: int = 0) -> At:
        """Of a block of these rows, in training."""
        facts = self.layout.facts
        at = facts.at(facts.to_block(batch))
        return at._replace(layer=jnp.int32(layer), row=jnp.int32(row), time=jnp.int32(time))

    def quick_jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`jax.jit`, for what runs a few times: a CPU's code takes far longer to be made well."""
        if axes := self.layout.task.axes:  # which a layer may use by their names: of size 1
            mesh = jax.make_mesh((1,) * len(axes), axes, devices=jax.local_devices()[:1])
            of_one: Any = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
            plain = jax.shard_map(lambda args, options: inner(*args, **options), **of_one)
            inner, function = function, lambda *args, **options: plain(args, options)
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        is_cpu = jax.default_backend() == "cpu"
        return jax.jit(function, compiler_options=quick if is_cpu else None)

    def random_x(self) -> Any:
        """Rows that differ in their means, too: statistics of many equal places would hardly differ."""

        def draw(shape: Any, dim: int) -> np.ndarray:
            kept = {dim, len(shape.shape) - 1}
            means = [size if number in kept else 1 for number, size in enumerate(shape.shape)]
            return self.random(shape) + self.rng.standard_normal(means).astype(shape.dtype)

        return jax.tree.map(draw, self.x, self.in_x)

    def random(self, shape: Any) -> np.ndarray:
        """Normal numbers."""
        return self.rng.standard_normal(shape.shape).astype(shape.dtype)

    def draw_outer(self, numbers: Sequence[Sequence[int]]) -> Any:
        """Variables outside of the layers, by their numbers; the compiler leaves out all others."""

        @self.quick_jit
        def draw():
            _, *states = self.layout.facts.split(self.layout.make(0))
            leaves = map(jax.tree.leaves, states)
            return [[own[n] for n in of] for own, of in zip(leaves, numbers, strict=True)]

        return draw()


def _replace(array: Any, dim: int, row: int | None, by_nan: bool) -> Any:
    """With another row in place of one, if there is one; or NaN if it is of floating-point numbers."""
    if row is None or dim == _NOWHERE:
        return array
    rows = np.moveaxis(np.array(array), dim, 0)
    is_nan = by_nan and jnp.issubdtype(rows.dtype, jnp.floating)
    rows[row] = np.nan if is_nan else rows[len(rows) - 1 - row]
    return np.moveaxis(rows, 0, dim)


def _same(a: Any, b: Any) -> bool:
    """Whether all bits are the same."""
    return a.tobytes() == b.tobytes()


def _dim_of_rows(shape: Any, of_twice: Any) -> int:
    """The dim that differs between the shapes of what is made of some rows and of twice as many."""
    sizes = enumerate(zip(shape.shape, of_twice.shape, strict=True))
    return next((dim for dim, (a, b) in sizes if a != b), _NOWHERE)


def _cut(tree: Any, dims: Any, start: int, stop: int) -> Any:
    """Some rows of a tree of arrays."""

    def cut(leaf: Any, dim: int) -> Any:
        return leaf if dim == _NOWHERE else np.take(leaf, range(start, stop), dim)

    return jax.tree.map(cut, tree, dims)


def _near(a: Any, b: Any) -> bool:
    """Whether trees of arrays are the same up to rounding over time."""
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        tolerance = max(OVER_TIME, UNITS * float(jnp.finfo(one.dtype).eps))
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        if not np.allclose(one, other, 0, tolerance * np.nanmax(abs(one), initial=0), True):
            return False
    return True


def _not_added(whole: Sums, *of_parts: Sums, of: tuple[str, str]) -> str | None:
    """The first number of a whole that is not the sum of those of its parts, in words; None if all are.

    Args:
      of: the words for the whole and for its parts.
    """
    for name, number in whole.by_name.items():
        parts = [float(part.by_name[name]) for part in of_parts]
        tolerance = max(TOLERANCE, UNITS * float(jnp.finfo(number.dtype).eps))
        if abs(float(number) - sum(parts)) > tolerance * sum(map(abs, parts)):
            each = " and ".join(f"{part:.6g}" for part in parts)
            return f"{name} is {float(number):.6g} for {of[0]}, and {each} for {of[1]}"
    return None
