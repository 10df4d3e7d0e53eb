"""A user's model, split into blocks: their parameters by name, and the parts of the program."""

import functools
from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.checks import require
from jaxpar.base.display import format_names
from jaxpar.base.parts import check_keys
from jaxpar.base.trees import has_time, shape_of, time_steps, uneven
from jaxpar.base.types import Batch, Leaves, Module, Shapes, Tree
from jaxpar.model.adopt.drawing import Drawing
from jaxpar.model.adopt.finding import check_sharing, check_state, find_blocks, possible_layers
from jaxpar.model.adopt.marks import (
    TRACING,
    Changes,
    changes,
    is_block,
    mark_block,
    mark_model,
    mark_outer,
)
from jaxpar.model.adopt.program import Program
from jaxpar.model.adopt.recurrent import chunk_time
from jaxpar.model.adopt.variables import Variables
from jaxpar.model.task import Task
from jaxpar.trace.across import line_across_time
from jaxpar.trace.again import difference
from jaxpar.trace.described import Descriptions
from jaxpar.trace.draws import Drawn, draws_apart
from jaxpar.trace.jaxprs import aval_of, equations_in, inlined, is_call
from jaxpar.trace.source_lines import source_line_of_error

# The operations that run kernels: of JAX's own calls of cuDNN, of others like it, and of Pallas.
_KERNELS = {"dot_product_attention_fwd_wrapper", "custom_partitioning", "pallas_call"}


class CutModel:
    """All that is known of a user's model from shapes.

    Attributes:
      name: of its class.
      layers: where its blocks are (`Task.layers`).
      variables: by name, and how they are drawn.
      kinds: the number of each block's kind; `first_of` the first block of each; `kind_names` theirs.
      carries: shapes of what each block carries along time.
      x_rows: of each array of each x, whether its first dim is that of rows.
      time_major: whether windows can be cut into chunks of time; `why_whole` says why not.
    """

    def __init__(self, task: Task, batch: Shapes, drawing: Drawing, layers: str):
        """Traces the loss.

        Raises:
          ValueError: the model is none that can be cut.
        """
        self.task, self.batch, self.layers = task, batch, layers
        model = drawing.model
        self.name = type(model).__name__
        found = find_blocks(model, layers)
        places, blocks = [path for path, _ in found], [block for _, block in found]
        is_stacked = len(places) > 1 and places[0] == places[1]
        check_sharing(model, blocks[:1] if is_stacked else blocks)
        check_state(model)
        self.variables = Variables(task, drawing, places, is_stacked=is_stacked)
        class_names = [type(block).__name__.lower() for block in blocks]
        for name, module in self.variables.find_outer(model).items():
            mark_outer(module, name)
        for number, block in enumerate(blocks if not is_stacked else ()):
            chunk_time(block)
            mark_block(block, number)
        mark_model(model)
        self._graphdef = nnx.graphdef(model)
        self._programs = dict[tuple[object, ...], Program]()
        self._drawn = dict[tuple[object, ...], Drawn | None]()
        self._check_again()
        self._find_kinds(class_names)
        self._find_rows()

    @classmethod
    def of(cls, task: Task, batch: Shapes) -> Self:
        """The model of a task; where it does not say what its blocks are, the only list that can be cut.

        Raises:
          ValueError: as of the constructor; or not one list of modules is called as a chain.
        """
        drawing = Drawing(f"the model of task {task.name}, a", task.make_model)
        if task.layers is not None:
            return cls(task, batch, drawing, task.layers)
        model, found, errors = drawing.model, list[Self](), list[str]()
        name, lists = type(model).__name__, [*possible_layers(model)]
        require(
            bool(lists),
            f"the model {name} has no list of modules, and layers is not given.\n"
            f"Fix: keep the blocks in an nnx.List, or name them in layers, such as layers='block_*'.",
        )
        for layers in lists:
            try:
                found.append(cls(task, batch, drawing, layers))
            except ValueError as error:
                if len(lists) == 1:
                    raise
                errors.append(f"\n  {layers}: {str(error).partition(chr(10))[0]}")
        names = format_names([each.layers for each in found]) or "none"
        require(
            len(found) == 1,
            f"layers is not given. Not one list alone in the model {name} is called as a chain, but {names}."
            f"{''.join(errors)}\nFix: name the list of the blocks, such as layers='blocks', and correct it.",
        )
        return found[0]

    def describe(self) -> str:
        """Where the blocks are, and what they are."""
        kinds = zip(
            self.kind_names, map(self.kinds.count, range(len(self.kind_names))), strict=True
        )
        return f"{self.name}.{self.layers}: {', '.join(f'{n} {name}' for name, n in kinds)}"

    def program(self, what: str, batch: Batch, *, trains: bool) -> Program:
        """The user's code for batches of such shapes.

        Args:
          what: "loss" or "predict".
        """
        batch = jax.tree.map(shape_of, batch)
        # A trace with a custom derivative in it depends on the mesh around it.
        key = what, trains, str(batch), jax.sharding.get_abstract_mesh()
        if key not in self._programs:
            self._programs[key] = self._trace(what, batch, trains=trains)
        return self._programs[key]

    def _trace(self, what: str, batch: Batch, *, trains: bool) -> Program:
        leaves, tree = jax.tree.flatten(batch)

        def run(params: Leaves, keys: Leaves, leaves: Leaves) -> tuple[Tree, Changes]:
            model = self.variables.merge(self._graphdef, params, keys)
            if not trains:
                model.eval()
            before = jax.tree.leaves(nnx.state(model))
            out = self._call(what, model, jax.tree.unflatten(tree, leaves))
            return out, changes(before, nnx.state(model))

        return Program(self.name, run, (*self.variables.shapes, leaves), self.variables)

    def _check_again(self) -> None:
        """Raises a ValueError if the loss is another program when it is traced again."""
        again = self._trace("loss", self.batch, trains=True)
        if found := difference(self.program("loss", self.batch, trains=True).closed, again.closed):
            place = f" ({found.source_line})" if found.source_line else ""
            raise ValueError(
                f"the loss of model {self.name}{place} computes with other numbers each time it is traced, "
                f"such as those of NumPy.\nFix: draw from a random stream of the model, nnx.Rngs."
            )

    def _call(self, what: str, model: Module, batch: Batch) -> Tree:
        """The loss; or predictions, which by default are what the model's own call returns in it."""
        tracing = TRACING.get()
        assert tracing is not None
        if what == "predict" and self.has_own_predict:
            out = self.task.predict(model, batch)
        else:
            loss = self.task.loss(model, batch)
            self._calls_model = tracing.output is not None
            out = tracing.output if what == "predict" else loss
        check_keys(out, f"the {what} of task {self.task.name}")
        return out

    @property
    def has_own_predict(self) -> bool:
        """Whether the task says what is predicted."""
        return type(self.task).predict is not Task.predict

    @functools.cached_property
    def calls_kernel(self) -> bool:
        """Whether its loss runs a kernel that XLA does not write: of cuDNN, or of Pallas."""
        program = self.program("loss", self.batch, trains=True)
        return any(eqn.primitive.name in _KERNELS for eqn in equations_in(program.closed.jaxpr))

    @functools.cached_property
    def predicts(self) -> bool:
        """Whether there is anything to predict, of what blocks give to the loss.

        Raises:
          ValueError: `predict` of the task needs something else of them.
        """
        if not (self._calls_model or self.has_own_predict):
            return False
        both = [self.program(what, self.batch, trains=False) for what in ("predict", "loss")]
        needed, given = (", ".join(v.aval.str_short() for v in own.xs[-1]) for own in both)
        require(
            needed == given or not self.has_own_predict,
            f"predict of task {self.task.name} uses {needed} from the blocks, but the loss uses {given}.\n"
            f"Fix: predict from the same outputs of the blocks as the loss.",
        )
        return needed == given and bool(jax.tree.leaves(both[0].out))

    def _find_kinds(self, class_names: Sequence[str]) -> None:
        """Blocks are of one kind if they do the same: in training, with their gradients, and after it."""
        numbers, descriptions = range(len(self.variables.places)), Descriptions()
        trained, evaluated = (
            self.program("loss", self.batch, trains=trains) for trains in (True, False)
        )
        blocks = []
        for n in numbers:
            metadata = [
                (name, *sorted(v.get_metadata().items()))
                for name, v in self.variables.own(n).items()
            ]
            in_training = descriptions.of_program(trained.part(n).closed)
            after_it = descriptions.of_program(evaluated.part(n).closed, is_differentiated=False)
            variables = descriptions.of_value(metadata)
            blocks.append((class_names[n], variables, in_training, after_it))
        self.first_of = [n for n in numbers if blocks[n] not in blocks[:n]]
        self.kinds = tuple(self.first_of.index(blocks.index(block)) for block in blocks)
        names = [class_names[n] for n in self.first_of]
        taken = {"kinds", "kind_of", "slots", "unroll", "cut"}
        self.kind_names = tuple(
            f"{name}{names[:n].count(name)}" if names.count(name) > 1 or name in taken else name
            for n, name in enumerate(names)
        )

    def _find_rows(self) -> None:
        """Which arrays of each x have rows; and whether all of them have time, and layers a state."""
        program = self.program("loss", self.batch, trains=True)
        self.carries = [program.part(n).carries for n in range(len(self.variables.places))]
        self.x_rows = self._dims_that_grow(program, 0)
        self.time_major = True  # as long as nothing is found that speaks against it
        self.why_whole = self._why_whole(program)
        self.time_major = not self.why_whole

    def _why_whole(self, program: Program) -> str:
        """The reason why windows cannot be split into time chunks; "" if they can, as far as shapes tell."""
        if not any(self.carries):
            return "no block has an nnx.RNN, which carries state from chunk to chunk"
        if why := uneven(self.batch):
            return why
        try:
            grows = self._dims_that_grow(program, 1)
        except Exception as error:  # a table of positions has an end
            line = source_line_of_error(error)
            at = f" ({line})" * bool(line)
            return (
                f"its code has a fixed number of time steps{at}: {str(error).partition(chr(10))[0]}"
            )
        if not all(all(each) for each in (*grows, *self.x_rows)):
            return "an array that goes from block to block is not [rows, time, ...]"
        parts = ("first", *range(len(self.variables.places)), "last")
        for part in parts:
            if program.part(part).keys and self.drawn("loss", part, self.batch) is None:
                return "random numbers are drawn that are not of one row and one time step each"
        return ""

    def line_across_time(self, kind: str | None, num_chunks: int) -> str:
        """The line of a part that does not treat each time step by itself, " (forecast.py, line 7)", or "".

        Args:
          kind: of the block; None is the part before the blocks.
        """
        part = "first" if kind is None else self.first_of[self.kind_names.index(kind)]

        shorter = resized(self.batch, lambda dim, size: size // num_chunks if dim else size)
        batches = self.batch, shorter
        programs = (self.program("loss", own, trains=True).part(part).closed for own in batches)
        window, chunk = (
            inlined(closed, lambda e: is_block(e) or is_call(e)) for closed in programs
        )
        line = line_across_time(window, chunk, num_chunks)
        return f" ({line})" if line else ""

    def drawn(self, what: str, part: int | str, batch: Batch) -> Drawn | None:
        """What a part draws for such a batch, apart from the rest; None if rows are not its first dim."""
        sizes = sizes_of(batch)[: 1 + self.time_major]
        key = (
            what,
            part,
            sizes,
            str(jax.tree.map(shape_of, batch)),
            jax.sharding.get_abstract_mesh(),
        )
        if key not in self._drawn:
            one = resized(batch, lambda dim, size: 1 if dim < len(sizes) else size)
            programs = (self.program(what, own, trains=True) for own in (batch, one))
            whole, single = (program.part(part) for program in programs)
            closed = whole.closed, single.closed
            self._drawn[key] = draws_apart(*closed, whole.keys, sizes, is_block)
        return self._drawn[key]

    def _dims_that_grow(self, program: Program, dim: int) -> list[list[bool]]:
        """Of each array of each x, whether this dim is that of the batch's rows, or time steps."""
        twice = resized(self.batch, lambda own, size: size * (1 + (own == dim)))
        more = self.program("loss", twice, trains=True)
        return [
            [
                aval_of(a).shape[dim : dim + 1] != aval_of(b).shape[dim : dim + 1]
                for a, b in zip(*pair, strict=True)
            ]
            for pair in zip(program.xs, more.xs, strict=True)
        ]


def sizes_of(batch: Batch) -> tuple[int, int]:
    """Rows and time steps."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    rows = next(shape[0] for shape in shapes if shape)
    return rows, max(time_steps(batch, 1).values(), default=1)


def resized(batch: Batch, change: Callable[[int, int], int]) -> Shapes:
    """Shapes of a batch with other sizes of the dims of rows, 0, and time, 1.

    Args:
      change: (dim, size) -> size.
    """

    def of(a: jax.Array, timed: bool) -> jax.ShapeDtypeStruct:
        sizes = list(jnp.shape(a))
        for dim in range(min(1 + timed, len(sizes))):
            sizes[dim] = change(dim, sizes[dim]) if dim == 0 or sizes[dim] > 1 else 1
        return jax.ShapeDtypeStruct(tuple(sizes), jnp.result_type(a))

    return jax.tree.map(of, batch, has_time(batch))
