"""Models, optimizers and layouts drawn at random: every mesh and schedule gives what the definition says.

A draw has a number, which its row is asked for by; it prints what it drew.
"""

import dataclasses
import functools
import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest
from lib.any_model import Calm, assert_same, assert_trains_as_defined, batch_of
from lib.laws import full, more
from lib.layers import (
    LRU,
    Attention,
    Balanced,
    ByDepth,
    Clipped,
    Ends,
    Experts,
    Join,
    Map,
    Norm,
    Penalized,
)
from lib.models import MAKERS, WIDTH, Series, WithStatic
from lib.optimizers import OPTIMIZERS, refusals

from jaxpar import RULES, MeshConfig, Parallel, PipelineConfig, Stack, nn
from jaxpar.base.stage_names import NamedPlacement
from jaxpar.model.facts import ModelFacts
from jaxpar.step.functions import init_state, value_and_grad
from jaxpar.step.setup import Setup

pytestmark = pytest.mark.law

LAYERS = {
    **MAKERS,
    "attention": lambda rngs: Attention(rngs=rngs),
    "experts": lambda rngs: Experts(rngs=rngs),
    "penalized": lambda rngs: Penalized(rngs=rngs),
    "norm": lambda rngs: Norm(rngs=rngs),
    "balanced": lambda rngs: Balanced(rngs=rngs),
    "map": lambda rngs: Map(WIDTH, WIDTH - 2, rngs=rngs),
    "join": lambda rngs: Join(rngs=rngs),
    "lru": lambda rngs: LRU(rngs=rngs),
    "clipped": lambda rngs: Clipped(rngs=rngs),
    **{f"by depth {n}": lambda rngs, n=n: ByDepth(1 / n, rngs=rngs) for n in (2, 5)},
    "narrow": lambda rngs: nn.LSTM(6, inputs=WIDTH, rngs=rngs, dropout=0.2),
    "widen": lambda rngs: nn.MinGRU(WIDTH, inputs=6, rngs=rngs),
}
# Layers, one after the other, from and to WIDTH units; where time may be in parts, only these.
BY_DEPTH = "by depth 2,by depth 5"
WITHOUT_STATE = ["dense", "norm", "wide 20", "wide 60", "map,join", BY_DEPTH]
WITH_STATE = ["lru", "lru", "penalized", "balanced", "narrow,widen", "narrow,widen,map,join"]
PIECES = [*WITHOUT_STATE, *MAKERS, *WITH_STATE]
CUT = {"both ways", "penalized"}  # across what `tensor` would split, as attention does
OF_AXES = {"context": "attention", "expert": "experts"}
WHOLE_WINDOW = {"block", "both ways"}
ROWS_TOGETHER = {"norm": Norm.rows_together, "balanced": Balanced.rows_together}


class Any(Ends):
    """With any layers, and a matrix that both ends use."""

    def __init__(self, kinds, how, *, rngs):
        super().__init__(how, rngs=rngs)
        self.layers = Stack([LAYERS[kind] for kind in kinds], rngs=rngs)

    def last(self, y, batch, at):
        if "tied" in self.how:
            table = self.marks[0].embedding[...]
            y = y + jnp.tanh(y @ table.T) @ table / len(table)
        if "static" in batch:
            y = y * (1 + batch["static"]["first"][None, :, :1])
        return super().last(y, batch, at)

    def first(self, batch, at):
        x = super().first(batch, at)
        return x + batch["static"]["first"][None, :, 1:2] if "static" in batch else x


@dataclasses.dataclass(frozen=True)
class Drawn(Calm):
    """`is_large`: what could be in pools and in parts is, else what costs decide."""

    how: tuple[str, ...] = ()
    own_axes: tuple[str, ...] = ()
    is_large: bool = False
    is_static: bool = False

    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        batches.__class__ = WithStatic if self.is_static else Series
        return batches

    @property
    def axes(self):
        return self.own_axes

    @property
    def rules(self):
        rules = {"heads": "tensor", "inner": "tensor"}
        if "context" in self.axes:
            rules["time"] = "context"
        if "expert" in self.axes:
            rules |= {"batch": ("data", "expert"), "experts": "expert"}
        return RULES.replace(rules)

    def make_model(self, rngs):
        return Any(self.kinds, self.how, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Trained(Drawn):
    """With an optimizer of optax, by its name in `OPTIMIZERS`."""

    own: str = "sgd"

    def make_optimizer(self, num_steps):
        return OPTIMIZERS[self.own]()


def draw(pick):
    """A model, and how devices share it, which may not fit each other.

    Args:
      pick: returns one of its arguments.
    """
    axes = pick((), (), ("context",), ("expert",), ("context", "expert"))
    sizes = {}
    for axis in ("stage", *axes, "data", "tensor"):
        room = 8 // int(np.prod([*sizes.values()]))
        most = min(room, {"stage": 8, "tensor": 1 if "context" in axes else 2}.get(axis, 4))
        sizes[axis] = pick(*(n for n in (1, 2, 2, 4, 8) if n <= most))
    stages, data, of_rows = sizes["stage"], sizes["data"], sizes.get("expert", 1)

    pieces = WITHOUT_STATE if "context" in axes else PIECES
    if sizes["tensor"] > 1:
        pieces = [piece for piece in pieces if piece not in CUT]
    pieces = [pick(*pieces) for _ in range(2)]
    pieces += [OF_AXES[axis] for axis in axes]
    kinds = ",".join(pick(*pieces) for _ in range(pick(1, 2, 3, 4))).split(",")
    if "context" not in axes and pick(True, *[False] * 7):
        kinds.append("clipped")

    schedule = pick("1f1b", "gpipe", *["interleaved", "v"] * (stages in (2, 4)))
    places = stages * (2 if schedule in ("interleaved", "v") else 1)
    cuts = [0, *sorted(pick(*range(len(kinds) + 1)) for _ in range(places - 1)), len(kinds)]
    numbers = tuple(end - begin for begin, end in itertools.pairwise(cuts))
    words = str(NamedPlacement(numbers, pick(True, True, False), pick(True, False)))
    placement = pick("balanced", numbers, words, *["even"] * (len(kinds) % places == 0))

    is_whole = "context" in axes or WHOLE_WINDOW.intersection(kinds)
    chunks, microbatches = 1 if is_whole else pick(1, 2, 4), pick(1, 2)
    remat = pick(False, False, True)
    pipeline = PipelineConfig(
        schedule=schedule,
        num_microbatches=microbatches,
        num_chunks=chunks,
        num_groups=2 if schedule == "interleaved" else 1,
        zero_bubble=pick(True, True, False),
        placement=placement,
        head="auto" if placement == words else pick("auto", "last", "sharded"),
        unroll=len({*kinds}) == 1 and places == stages and pick(True, False),
        remat=remat,
        remat_keeps=pick("device", *["host", *["carries"] * (chunks > 2)] * remat),
    )
    mesh = MeshConfig(data, stages, sizes["tensor"], axes=tuple((a, sizes[a]) for a in axes))
    mesh = dataclasses.replace(mesh, devices=tuple(range(mesh.num_devices)))
    shares = pick(None, (3, 1), (1, 2)) if data == 2 and of_rows == 1 else None
    speeds = None
    if placement not in ("even", words):  # speeds decide on the placement
        speeds = pick(None, None, tuple(1.0 + stage % 2 for stage in range(stages)))
    optimizer = pick(None, pick(*OPTIMIZERS))
    update = pick("replicated", "sharded", "host") if optimizer else "replicated"
    parallel = Parallel(mesh, pipeline, shares, speeds, fsdp=pick(True, False), update=update)

    together = max(ROWS_TOGETHER.get(kind, 1) for kind in kinds)
    rows = sum(parallel.group_shares) * microbatches * of_rows * together
    how = [word for word in ("deep", "twice", "array", "loop", "tied") if pick(True, *[False] * 3)]
    make_task = functools.partial(Trained, own=optimizer) if optimizer else Drawn
    task = make_task(
        tuple(kinds),
        rows * pick(1, 2),
        seq_len=pick(4, 8),
        how=tuple(how),
        own_axes=axes,
        is_large=pick(True, False),
    )
    freeze = pick(None, None, None, "scale", "words", "up", *ModelFacts.of(task).kinds)
    return dataclasses.replace(task, freeze=freeze), parallel


LARGE = {
    "jaxpar.partition.partition.LITTLE": 1e-9,
    "jaxpar.partition.partition.FEW": 0,
    "jaxpar.model.facts.ModelFacts.layer_flops": np.inf,
    "jaxpar.partition.pool.COLUMNS": 8,
}


def splits_a_batch(parallel):
    sizes, pipeline = parallel.mesh.sizes, parallel.pipeline
    num_parts = [size for axis, size in sizes.items() if axis not in ("stage", "tensor")]
    return max(*num_parts, pipeline.num_microbatches, pipeline.num_chunks) > 1


DRAWS = [*range(10), *map(full, range(10, 40)), *map(more, range(40, 220))]


@pytest.mark.parametrize("number", DRAWS)
def test_random_models_on_random_layouts_equal_their_definition(number, monkeypatch):
    numbers = random.Random(number)
    for _ in range(8):
        task, parallel = draw(lambda *options: numbers.choice(options))
        task = dataclasses.replace(task, is_static=number % 2 == 0)
        print(f"drawn: {task}, {parallel}")
        for name, value in LARGE.items() if task.is_large else ():
            monkeypatch.setattr(name, value)
        try:
            Setup.of(task, parallel)
            break
        except ValueError as error:
            print(f"refused: {error}")
            monkeypatch.undo()
    if number % 5:  # a fifth of what a row takes
        monkeypatch.setattr("jaxpar.step.step.check_rows_alone", lambda parts: None)
    if "clipped" in task.kinds and splits_a_batch(parallel):
        others = refusals(parallel, getattr(task, "own", None), is_clipped=False)
        texts = "|".join(["the backward pass of clipped_in_backward", *others])
        with pytest.raises(ValueError, match=texts):
            value_and_grad(task, parallel)(init_state(task, parallel), batch_of(task))
        return
    try:
        run = assert_trains_as_defined if isinstance(task, Trained) else assert_same
        run(task, parallel)
    except ValueError as error:
        allowed = refusals(parallel, getattr(task, "own", None), is_clipped="clipped" in task.kinds)
        if not any(text in str(error) for text in allowed):
            raise
        print(f"refused: {error}")
