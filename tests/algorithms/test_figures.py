"""Figures of memory, bytes and curves: their bars are what is, and no text is cut or overlaps another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib import api
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from jaxpar import MeshConfig, Parallel, inspect_step
from jaxpar.analysis import inspect_function
from jaxpar.lm import LM
from jaxpar.pictures import figures

TASK = LM(num_layers=2, hidden_size=8, embed_size=8, vocab_size=32, batch_size=8, seq_len=4)


def texts(figure):
    """Everything written in a figure, after a check that all of it is inside and no two overlap."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, (width, height) = canvas.get_renderer(), canvas.get_width_height()
    found, not_drawn = [], set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                not_drawn |= {tick.label1, tick.label2}
    for text in set(figure.findobj(Text)) - not_drawn:
        box = text.get_window_extent(renderer)
        if not text.get_visible() or not text.get_text().strip():
            continue
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
        found.append((text.get_text(), box))
    for i, (a, box) in enumerate(found):
        for b, other in found[i + 1 :]:
            assert a == b or not box.overlaps(other), f"{a!r} overlaps {b!r}"
    return [text for text, _ in found]


@pytest.mark.full
def test_figures_of_memory_and_bytes_add_up():
    parallel = Parallel(MeshConfig(data=2, tensor=4))
    report = inspect_step(TASK, parallel)
    memory = report.memory.parts
    assert sum(memory.values()) == report.memory.total
    # Two arrays of token numbers [4, 4] on a device, a flag, and what pads arguments.
    assert 128 <= memory["batch and schedule"] <= 512
    # Adam has two moments, and a counter.
    assert 0 < memory["optimizer state"] - 2 * memory["parameters"] <= 64
    assert "memory per device" in texts(figures.draw_memory({"a": report}))
    figure = figures.draw_bytes({"dp2tp4": report, "the same": report})
    sent = {" and ".join(total.axes): total.sent_bytes for total in report.totals}
    bars = {c.get_label(): [bar.get_width() for bar in c] for c in figure.axes[0].containers}
    assert {"along data", "along tensor"} <= set(bars)
    for label, sizes in bars.items():
        assert sizes == pytest.approx([sent[label.removeprefix("along ")]] * 2)
    assert "sent per device in a step" in " ".join(texts(figure))


def test_a_report_without_memory_has_no_figure_of_it():
    report = inspect_function(lambda x: x + 1, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert "memory per device" in texts(figures.draw_memory({"a": report}))
    with pytest.raises(ValueError, match="reports no memory on this backend\nFix: use JAX_PLATFO"):
        figures.draw_memory({"a": report, "b": dataclasses.replace(report, memory=None)})


def test_collectives_that_are_not_counted_are_named():
    mesh = MeshConfig(data=8).build()
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    n = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))

    def loop(x, n):
        return jax.lax.while_loop(
            lambda carry: carry[0] < n,
            lambda carry: (
                carry[0] + 1,
                carry[1] + jnp.broadcast_to(carry[1].sum(0)[None], (8, 4)),
            ),
            (jnp.int32(0), x),
        )

    report = inspect_function(loop, x, n)
    assert report.totals[0].unknown == 1
    written = texts(figures.draw_bytes({"dp8": report}))
    assert any("without 1 collective in loops of unknown length" in text for text in written)


LINES = [
    {"split": "train", "step": step, "loss": 5 - step / 10, "tokens_per_second": speed}
    for step, speed in ((1, None), (10, 1e4), (20, 2e4))
] + [{"split": "valid", "step": 20, "loss": 4.0}]


def test_a_figure_of_curves_has_the_losses_of_runs():
    runs = {f"runs/000{n}": api.curves(0, *LINES[: 5 - n]) for n in (1, 2)}
    figure = figures.draw_curves(runs)
    curves = [np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].get_lines()]
    train = [[1, 4.9], [10, 4.0], [20, 3.0]]
    assert curves == [train, [[20, 4.0]], train]
    assert {"loss", "step", "runs/0001, validation loss"} <= set(texts(figure))
