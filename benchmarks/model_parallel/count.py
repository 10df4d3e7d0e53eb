"""What data and model parallelism exchange, read from compiled programs: a dense layer, and a small AlexNet.

    python -m benchmarks.model_parallel.count

Nothing is run: the programs are compiled for simulated devices, and their collectives are counted.
"""

import collections
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

import jaxpar
from jaxpar import MeshConfig
from jaxpar.analysis import Collective, ProgramReport, inspect_function, inspect_step
from jaxpar.base.axes import BATCH, DATA, TENSOR
from jaxpar.model.task import find_task
from jaxpar.sharding import Constraint, Rules

DIGITS = find_task(f"{Path(__file__).parents[2]}/examples/hybrid.py:Digits")
BATCH_SIZE, IN_SIZE, OUT_SIZE = 128, 1000, 500
SPLITS = {"data": "data", "row": "first dim", "column": "second dim"}

# The dim that each cuts: rows of the batch, columns or rows of a kernel [..., in, out].
IN, OUT = "in", "out"
CUT = {"data": BATCH, "column": OUT, "row": IN}

# What the post adds up for two devices.
POST = {
    ("data", "backward"): ("1000x500", 500_000),
    ("row", "forward"): ("128x500", 64_000),
    ("row", "backward"): ("128x500", 64_000),
    ("column", "forward"): ("128x250", 32_000),
    ("column", "backward"): ("128x1000", 128_000),
}

# Dims of the two layers one after the other.
ROWS, OUTER, INNER = "rows", "outer", "inner"

Row = tuple[object, ...]


def make_mesh(num_devices: int) -> Mesh:
    """The first devices, all on the axis `tensor`."""
    return MeshConfig(tensor=num_devices, devices=tuple(range(num_devices))).build()


def inspect_split(
    layer: nnx.Module,
    shape: tuple[int, ...],
    mesh: Mesh,
    split: str,
    *,
    is_first: bool = False,
) -> ProgramReport:
    """What the compiled forward and backward pass of a split layer really exchange.

    Args:
      layer: one with a kernel [..., in, out]; may be abstract.
      is_first: whether the gradient of its input is not needed.
      shape: of the input.
      mesh: has the axes of `axes.MESH_AXES`; all its devices take a part.
      split: "data", "column" or "row".
    """
    rules = {dim: (DATA, TENSOR) if dim == CUT[split] else None for dim in CUT.values()}
    layout = Constraint(mesh, Rules.make(rules))
    rows = (BATCH, *[None] * (len(shape) - 1))
    graphdef, params = nnx.split(layer)

    def place(array: Any, *dims: str | None) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, layout.rules.spec(dims))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    def names(param: Any) -> tuple[str | None, ...]:
        return (*[None] * (param.ndim - 2), IN, OUT)[-param.ndim :]

    def forward(params, x):
        x = layout(layout(x, *rows), *rows[:-1], IN)
        y = layout(nnx.merge(graphdef, params)(x), *rows[:-1], OUT)
        return layout(y, *rows)

    def run(params, x, dy):
        y, backward = jax.vjp(forward, params, x)
        d_params, dx = backward(dy)
        d_params = jax.tree.map(lambda leaf: layout(leaf, *names(leaf)), d_params)
        return (y, d_params) if is_first else (y, d_params, dx)

    x = place(jax.ShapeDtypeStruct(shape, jnp.float32), *rows)
    y: Any = jax.eval_shape(forward, params, x)
    params = jax.tree.map(lambda leaf: place(leaf, *names(leaf)), params)
    return inspect_function(run, params, x, place(y, *rows), mesh=mesh)


def dense_layer() -> Iterator[Row]:
    """The post's layer, split in each way over 2 and 4 devices."""
    layer = nnx.eval_shape(lambda: nnx.Linear(IN_SIZE, OUT_SIZE, use_bias=False, rngs=nnx.Rngs(0)))
    for num_devices in (2, 4):
        for split, name in SPLITS.items():
            report = inspect_split(layer, (BATCH_SIZE, IN_SIZE), make_mesh(num_devices), split)
            for c in report.collectives:
                shape, count = POST[split, c.phase] if num_devices == 2 else ("", "")
                post = f"{shape} = {count:,}" if shape else ""
                yield num_devices, name, c.phase, *exchanged(c), post
            posts = [count for (other, _), (_, count) in POST.items() if other == split]
            total = f"{sum(posts):,}" if num_devices == 2 else ""
            yield num_devices, name, "**both**", "", "", *totals(report.collectives), total


def chained_layers() -> Iterator[Row]:
    """The layer and one that leads back to 1000, each by itself and one after the other."""
    mesh = make_mesh(2)
    layout = Constraint(mesh, Rules.make({ROWS: None, OUTER: None, INNER: TENSOR}))
    up, down = (
        jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, layout.rules.spec(dims))
        )
        for shape, dims in (
            ((IN_SIZE, OUT_SIZE), (OUTER, INNER)),
            ((OUT_SIZE, IN_SIZE), (INNER, OUTER)),
        )
    )
    x = jax.ShapeDtypeStruct(
        (BATCH_SIZE, IN_SIZE), jnp.float32, sharding=NamedSharding(mesh, jax.P())
    )

    def step(between: str | None):
        def forward(up, down, x):
            h = layout(layout(x, ROWS, OUTER) @ up, ROWS, INNER)
            h = layout(nnx.relu(layout(h, ROWS, between)), ROWS, INNER)
            return layout(h @ down, ROWS, OUTER)

        def run(up, down, x, dy):
            y, backward = jax.vjp(forward, up, down, x)
            return y, backward(dy * y)  # as of a loss, the backward pass waits for the forward pass

        return inspect_function(run, up, down, x, x, mesh=mesh).collectives

    for name, between in (("gathered", None), ("kept split", INNER)):
        for c in (collectives := step(between)):
            yield name, c.phase, *exchanged(c)
        yield name, "**both**", "", "", *totals(collectives)


def networks() -> Iterator[Row]:
    """The whole training step of the small AlexNet by each strategy."""
    for strategy in ("hybrid", "hybrid-gather", "data", "model"):
        collectives = inspect_step(DIGITS(strategy=strategy), "dp8").collectives
        for c in sorted(collectives, key=lambda c: -c.sent_bytes):
            if c.sent_bytes >= 1000:  # not the labels, norms and the like
                yield strategy, c.phase, *exchanged(c), f"{c.sent_bytes:,}"
        sent = sum(c.sent_bytes for c in collectives)
        yield strategy, "**all**", "", "", *totals(collectives), f"**{sent:,}**"


def exchanged(c: Collective) -> Row:
    """Kind, array, its elements, and those that a device sends."""
    shapes = collections.Counter("x".join(map(str, shape)) for shape in c.shapes if shape)
    largest = sorted(shapes, key=lambda shape: -shape.count("x"))
    arrays = [f"{shapes[shape]} of {shape}" if shapes[shape] > 1 else shape for shape in largest]
    more = f" and {len(arrays) - 3} more" if len(arrays) > 3 else ""
    return c.op, ", ".join(arrays[:3]) + more, f"{c.elements:,}", f"{c.sent_bytes // 4:,}"


def totals(collectives: Iterable[Collective]) -> Row:
    """Elements, and those that a device sends."""
    parts = list(collectives)
    return f"{sum(c.elements for c in parts):,}", f"**{sum(c.sent_bytes for c in parts) // 4:,}**"


def table(headings: str, rows: Iterable[Row]) -> str:
    """Markdown; the columns from elements on are numbers."""
    names = headings.split(", ")
    first = names.index("elements")
    lines = [names, ["---" if number < first else "---:" for number in range(len(names))], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> None:
    """Prints the tables."""
    jaxpar.simulate_devices(8)
    tables = (
        (
            "devices, split, pass, collective, array, elements, a device sends, the post",
            dense_layer(),
        ),
        ("between, pass, collective, array, elements, a device sends", chained_layers()),
        ("strategy, pass, collective, arrays, elements, a device sends, bytes", networks()),
    )
    print("\n\n".join(table(headings, rows) for headings, rows in tables))


if __name__ == "__main__":
    main()
