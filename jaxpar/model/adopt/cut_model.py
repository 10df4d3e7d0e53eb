"""A user's model, cut: its blocks, its parameters by their names, and the parts of its programs."""

import functools
from collections.abc import Sequence

import jax
from flax import nnx

from jaxpar.base.checks import require
from jaxpar.base.display import format_names
from jaxpar.base.trees import shape_of
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
from jaxpar.trace.draws import Drawn, draws_apart
from jaxpar.trace.jaxprs import aval_of


class CutModel:
    """All that is known of a user's model from shapes.

    Attributes:
      name: of its class.
      layers: where its blocks are (`Task.layers`).
      variables: by name, and how they are drawn.
      kinds: the number of each block's kind; `first_of` the first block of each; `kind_names` theirs.
      carries: shapes of what each block carries along time.
      x_rows: of each array of each x, whether its first dim is that of rows.
      time_major: whether windows can be cut into chunks of time.
    """

    def __init__(self, task: Task, batch: Shapes):
        """Traces the model and the loss.

        Raises:
          ValueError: the model is none that can be cut.
        """
        self.task, self.batch = task, batch
        drawing = Drawing(task.make_model)
        model = drawing.model
        self.name = type(model).__name__
        self.layers = task.layers or self._only_layers(model)
        found = find_blocks(model, self.layers)
        places, blocks = [path for path, _ in found], [block for _, block in found]
        check_sharing(model, list({id(block): block for block in blocks}.values()))
        check_state(model)
        is_stacked = len(blocks) > 1 and blocks[0] is blocks[1]
        self.variables = Variables(task, drawing, places, is_stacked=is_stacked)
        class_names = [type(block).__name__.lower() for block in blocks]
        for name, module in self.variables.outer_modules.items():
            mark_outer(module, name)
        for number, block in enumerate(blocks if not is_stacked else ()):
            chunk_time(block)
            mark_block(block, number)
        mark_model(model)
        self._graphdef = nnx.graphdef(model)
        self._programs = dict[tuple[object, ...], Program]()
        self._drawn = dict[tuple[object, ...], Drawn | None]()
        self._find_kinds(class_names)
        self._find_rows()

    def _only_layers(self, model: Module) -> str:
        found = [*possible_layers(model)]
        require(
            len(found) == 1,
            f"the model {self.name} has {len(found)} lists of modules ({format_names(found)}), and layers "
            f"is not given.\nFix: name the one that holds the blocks, such as layers='blocks'.",
        )
        return found[0]

    def program(self, what: str, batch: Batch, *, trains: bool) -> Program:
        """The user's code for batches of such shapes.

        Args:
          what: "loss" or "predict".
        """
        batch = jax.tree.map(shape_of, batch)
        leaves, tree = jax.tree.flatten(batch)
        # A trace with a custom derivative in it depends on the mesh around it.
        key = what, trains, str(batch), jax.sharding.get_abstract_mesh()
        if key not in self._programs:

            def run(params: Leaves, keys: Leaves, leaves: Leaves) -> tuple[Tree, Changes]:
                model = self.variables.merge(self._graphdef, params, keys)
                if not trains:
                    model.eval()
                before = jax.tree.leaves(nnx.state(model))
                out = self._call(what, model, jax.tree.unflatten(tree, leaves))
                return out, changes(before, nnx.state(model))

            given = *self.variables.shapes, leaves
            self._programs[key] = Program(self.name, run, given, self.variables)
        return self._programs[key]

    def _call(self, what: str, model: Module, batch: Batch) -> Tree:
        """The loss; or predictions, which by default are what the model's own call returns in it."""
        tracing = TRACING.get()
        assert tracing is not None
        if what == "predict" and self.has_own_predict:
            return self.task.predict(model, batch)
        out = self.task.loss(model, batch)
        return tracing.output if what == "predict" else out

    @property
    def has_own_predict(self) -> bool:
        """Whether the task says what is predicted."""
        return type(self.task).predict is not Task.predict

    @functools.cached_property
    def predicts(self) -> bool:
        """Whether there is anything to predict."""
        if self.has_own_predict:
            return True
        return bool(jax.tree.leaves(self.program("predict", self.batch, trains=False).out))

    def _find_kinds(self, class_names: Sequence[str]) -> None:
        numbers = range(len(self.variables.places))
        both = [self.program("loss", self.batch, trains=trains) for trains in (True, False)]
        texts = []
        for n in numbers:
            own = [
                (name, str(sorted(v.get_metadata().items(), key=str)))
                for name, v in self.variables.own(n).items()
            ]
            texts.append((class_names[n], str(own), *(program.part(n).text() for program in both)))
        self.first_of = [n for n in numbers if texts[n] not in texts[:n]]
        self.kinds = tuple(self.first_of.index(texts.index(text)) for text in texts)
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
        grows = self._dims_that_grow(program, 1) if any(self.carries) else [[False]]
        self.time_major = all(all(each) for each in (*grows, *self.x_rows))
        parts = ("first", *range(len(self.variables.places)), "last")
        drawing = [part for part in parts if program.part(part).keys]
        if any(self.drawn("loss", part, self.batch) is None for part in drawing):
            self.time_major = False

    def drawn(self, what: str, part: int | str, batch: Batch) -> Drawn | None:
        """What a part draws for such a batch, apart from the rest; None if rows are not its first dim."""
        dims = 1 + self.time_major
        key = what, part, dims, str(jax.tree.map(shape_of, batch)), jax.sharding.get_abstract_mesh()
        if key not in self._drawn:
            one = jax.tree.map(lambda a: _with_sizes(a, (1,) * dims), batch)
            programs = (self.program(what, own, trains=True) for own in (batch, one))
            whole, single = (program.part(part) for program in programs)
            closed = whole.closed, single.closed
            self._drawn[key] = draws_apart(*closed, whole.keys, dims, is_block)
        return self._drawn[key]

    def _dims_that_grow(self, program: Program, dim: int) -> list[list[bool]]:
        """Of each array of each x, whether this dim is that of the batch's rows, or time steps."""

        def twice(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return _with_sizes(a, (*a.shape[:dim], *(2 * size for size in a.shape[dim : dim + 1])))

        try:
            more = self.program("loss", jax.tree.map(twice, self.batch), trains=True)
        except Exception:
            return [[False]]
        return [
            [
                aval_of(a).shape[dim : dim + 1] != aval_of(b).shape[dim : dim + 1]
                for a, b in zip(*pair, strict=True)
            ]
            for pair in zip(program.xs, more.xs, strict=True)
        ]


def _with_sizes(a: jax.Array | jax.ShapeDtypeStruct, sizes: Sequence[int]) -> jax.ShapeDtypeStruct:
    """The shape of an array with other sizes of its first dims."""
    sizes = sizes[: len(a.shape)]
    return jax.ShapeDtypeStruct((*sizes, *a.shape[len(sizes) :]), a.dtype)
