"""Models in the layer form: any layers in any order, between ends of several parts."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar import RULES, Stack, Sums, nn
from lib import layers as own
from lib import models
from lib.law.training import Trained
from lib.layers import Around, Join, Map
from lib.models import FEATURES, WIDTH, Series


@dataclasses.dataclass(frozen=True)
class Piece:
    """One layer, or some that follow each other, from and to WIDTH units.

    Attributes:
      makers: of (rngs, rate of dropout).
      is_whole: whether it reads the whole window.
      is_stateless: whether it may run on a part of time, as an axis of one's own gives it.
      splits: whether `tensor` may split models that have it.
      rows_together: that it mixes.
      is_any_type: whether it is compared in bfloat16, too. What divides by lengths or by sums of weights
        is not: there a step alone and a chunk of steps differ by far more than a rounding.
      is_one_kind: whether several of it are layers of one kind.
      wraps: of `WRAPS`, the layers of `jaxpar.nn` that take it.
    """

    makers: tuple[Callable, ...]
    is_whole: bool = False
    is_stateless: bool = False
    splits: bool = True
    rows_together: int = 1
    is_any_type: bool = False
    is_one_kind: bool = True
    wraps: tuple[str, ...] = ()


def recurrent(make, *, is_any_type=False, **options):
    """A recurrent layer of `jaxpar.nn`."""
    return Piece(
        (lambda rngs, rate: make(WIDTH, rngs=rngs, dropout=rate, **options),),
        is_any_type=is_any_type,
        wraps=("both ways", "gated block"),
    )


def cell(make):
    """A recurrent cell of Flax."""
    return Piece(
        (lambda rngs, rate: nn.Recurrent(make(WIDTH, WIDTH, rngs=rngs)),), wraps=("both ways",)
    )


def of(make, *arguments, **options):
    """A class of the tests."""
    return Piece((lambda rngs, rate: make(*arguments, rngs=rngs),), **options)


def both_ways(rngs, rate):
    one, other = nn.GRU(WIDTH, rngs=rngs, dropout=rate), nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)
    return nn.Bidirectional(one, nn.Recurrent(other))


def stateless(make):
    """A module of y alone."""
    return Piece((lambda rngs, rate: nn.Stateless(make(rngs)),), is_stateless=True)


NARROW = 6
LAYERS = {
    "lstm": recurrent(nn.LSTM, is_any_type=True),
    "lstm, learned start": recurrent(nn.LSTM, is_any_type=True, learn_initial=True),
    "lstm, heads": recurrent(nn.LSTM, is_any_type=True, num_heads=2),
    "gru": recurrent(nn.GRU, is_any_type=True),
    "gru, heads": recurrent(nn.GRU, num_heads=2),
    "slstm": recurrent(nn.SLSTM),
    "slstm, heads": recurrent(nn.SLSTM, num_heads=2),
    "mlstm": recurrent(nn.MLSTM, num_heads=2),
    "gated delta": recurrent(nn.GatedDeltaNet, num_heads=2),
    "mingru": recurrent(nn.MinGRU, is_any_type=True),
    "rglru": recurrent(nn.RGLRU),
    "both ways": Piece((both_ways,), is_whole=True, splits=False),
    "flax lstm": cell(nnx.OptimizedLSTMCell),
    "flax gru": cell(nnx.GRUCell),
    "flax simple cell": cell(nnx.SimpleCell),
    "linear": stateless(lambda rngs: nn.Linear(WIDTH, WIDTH, dims=(None, "hidden"), rngs=rngs)),
    "layer norm": stateless(lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs)),
    "dense": of(models.Dense, is_stateless=True),
    "wide": of(models.Wide, 20, is_stateless=True),
    "wider": of(models.Wide, 60, is_stateless=True),
    "own gru": of(models.GRU),
    "block": of(models.Block, is_whole=True),
    "norm of rows": of(own.Norm, is_stateless=True, rows_together=own.GROUP),
    "experts of rows": of(own.Balanced, rows_together=2 * own.GROUP),
    "penalized": of(own.Penalized, splits=False),
    "complex state": of(own.LRU),
    "by depth": of(own.ByDepth, 0.5, is_stateless=True, is_one_kind=False),
    "complex x": Piece(
        tuple(
            lambda rngs, rate, make=make: make(rngs=rngs)
            for make in (own.ToComplex, own.FromComplex)
        ),
        is_stateless=True,
    ),
    "dict": Piece(
        (
            lambda rngs, rate: Map(WIDTH, WIDTH - 2, rngs=rngs),
            lambda rngs, rate: Join(rngs=rngs),
        ),
        is_stateless=True,
    ),
    "narrow": Piece(
        (
            lambda rngs, rate: nn.LSTM(NARROW, inputs=WIDTH, rngs=rngs, dropout=rate),
            lambda rngs, rate: nn.MinGRU(WIDTH, inputs=NARROW, rngs=rngs),
        ),
        is_any_type=True,
    ),
}
OF_AXES = {
    "context": of(own.Attention, is_whole=True, is_stateless=True),
    "expert": of(own.Experts, is_stateless=True),
}


def in_both_ways(piece):
    """Two of it, one of which reads time backwards."""
    [make] = piece.makers
    makers = (lambda rngs, rate: nn.Bidirectional(make(rngs, rate), make(rngs, rate)),)
    return dataclasses.replace(piece, makers=makers, is_whole=True, is_any_type=False)


def in_a_block(piece):
    """With a norm, a gate and a residual connection."""
    [make] = piece.makers
    makers = (lambda rngs, rate: nn.GatedBlock(make(rngs, rate), rngs=rngs),)
    return dataclasses.replace(piece, makers=makers, is_any_type=False)


WRAPS = {"nothing": lambda piece: piece, "both ways": in_both_ways, "gated block": in_a_block}


def pieces_of(names, wrap):
    """Pieces by name; those that can be are wrapped."""
    pieces = [(LAYERS | OF_AXES)[name] for name in names]
    return [WRAPS[wrap](piece) if wrap in piece.wraps else piece for piece in pieces]


class Frame(Around):
    """All but the layers; `dtype` is that of what goes through them."""

    def __init__(self, how, dtype="float32", *, rngs):
        super().__init__(how, rngs=rngs)
        self.dtype = dtype

    def first(self, batch, at):
        x = super().first(batch, at)
        if "static" in batch:
            x = x + batch["static"]["first"][None, :, 1:2]
        return x.astype(self.dtype)

    def _outputs(self, y, batch):
        y = y.astype(jnp.float32)
        if "lengths" in batch:  # padding counts nowhere
            y = y * (batch["weight"] > 0).astype(y.dtype)[..., None]
        if "tied" in self.how:
            table = self.marks[0].embedding[...]
            y = y + jnp.tanh(y @ table.T) @ table / len(table)
        return y * (1 + batch["static"]["first"][None, :, :1]) if "static" in batch else y

    def last(self, y, batch, at) -> Sums:
        return super().last(self._outputs(y, batch), batch, at)

    def predict(self, y, batch, at):
        y = self._outputs(y, batch)
        return {"y": self.foretold(y), "deviation": y.std(-1)}


class Model(Frame):
    def __init__(self, task, *, rngs):
        super().__init__(task.how, task.dtype, rngs=rngs)
        makers = [make for piece in task.pieces for make in piece.makers]
        self.layers = Stack(
            [lambda rngs, make=make: make(rngs, task.rate) for make in makers], rngs=rngs
        )


class Batches(Series):
    """Windows of a series, with what the case asks for.

    Attributes:
      has: of "resets", "lengths" and "static".
    """

    has: tuple[str, ...] = ()

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        first, steps = batch["x"][:, 0], batch["x"].shape[1]
        if "resets" not in self.has:
            del batch["resets"]
        if "lengths" in self.has:
            lengths = steps - np.abs(first[:, 2] * 1000).astype(np.int32) % 3
            is_real = (np.arange(steps) < lengths[:, None]).astype(np.float32)
            batch |= {"lengths": lengths, "weight": batch["weight"] * is_real}
        if "static" in self.has:
            batch["static"] = {"first": first, "sign": np.sign(first)}
        return batch


@dataclasses.dataclass(frozen=True)
class LayerTask(Trained):
    """A model in the layer form.

    Attributes:
      names: of its pieces.
      wrap: of `WRAPS`.
      how: of the ends.
      has: what batches have besides.
      rate: of dropout.
      dtype: of what goes from layer to layer.
      own_axes: of the mesh.
    """

    names: tuple[str, ...] = ()
    wrap: str = "nothing"
    how: str = ""
    has: tuple[str, ...] = ()
    rate: float = 0.2
    dtype: str = "float32"
    own_axes: tuple[str, ...] = ()
    batch_size: int = 16
    seq_len: int = 8

    @property
    def pieces(self):
        """Its pieces, one after the other."""
        return pieces_of(self.names, self.wrap)

    @property
    def axes(self):
        return self.own_axes

    @property
    def rules(self):
        rules = {"heads": "tensor", "inner": "tensor"}
        if "context" in self.own_axes:
            rules["time"] = "context"
        if "expert" in self.own_axes:
            rules |= {"batch": ("data", "expert"), "experts": "expert"}
        return RULES.replace(rules)

    def make_model(self, rngs):
        return Model(self, rngs=rngs)

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(["train", "valid", "test"].index(split))
        steps = 3 * self.batch_size * self.seq_len
        walk = rng.normal(size=(steps + 1, FEATURES)).cumsum(0).astype(np.float32) / 100
        walk = np.sin(walk)  # small, so that no gate is saturated
        resets = (rng.random(steps) < 0.1).astype(np.float32)
        arrays = {"x": walk[:-1], "y": 10 * walk[1:], "resets": resets}
        batches = Batches(arrays, self.batch_size, self.seq_len, seed)
        batches.has = self.has
        return batches
