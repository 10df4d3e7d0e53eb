"""What a training step sends, from its sizes alone: every collective of the program that XLA makes of it.

Tests hold it to the compiled program, to the byte. It is what XLA's CPU compiler makes of a step in float32,
with whole arrays summed where a GPU's may scatter them. What an embedding narrower than the layers sends is
an estimate on `tensor` above 4.

Legend: T time, B batch, t steps of a chunk, b rows of a microbatch, H hidden, V vocabulary.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from jaxpar.analysis.collectives import sent_bytes
from jaxpar.axes import DATA, STAGE, TENSOR
from jaxpar.planning.pieces import WORD
from jaxpar.planning.shape import StepShape


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A collective, or several of one kind.

    Attributes:
      op, axes, bytes, sent_bytes: of one run, as of `collectives.Collective`.
      count: runs in a step.
      what: is sent, in words.
    """

    op: str
    axes: tuple[str, ...]
    bytes: int
    sent_bytes: float
    count: int
    what: str


def predict_traffic(step: StepShape) -> tuple[Traffic, ...]:
    """The collectives of a training step of the full length, without those of an update on the host.

    Raises:
      ValueError: what a step sends is not modelled: with unequal shares, a tied embedding, or bfloat16.
    """
    for what, wrong in (
        ("unequal shares", not step.parallel.has_equal_shares),
        ("tie_embedding=True", step.model.tie_embedding),
        (f"dtype={step.model.dtype!r}", step.model.dtype != "float32"),
    ):
        if wrong:
            raise ValueError(f"{what}: what that sends is not modelled; use inspect_step")
    return tuple(_Sender(step).all())


def totals(traffic: Sequence[Traffic]) -> dict[tuple[str, tuple[str, ...]], int]:
    """(op, axes) -> bytes of all runs."""
    sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for part in traffic:
        sums[part.op, part.axes] += part.count * part.bytes
    return dict(sums)


class _Sender:
    """The parts of a step, in its order."""

    def __init__(self, step: StepShape):
        self.step, self.parallel, self.sizes = step, step.parallel, step.sizes

    def all(self) -> Iterator[Traffic]:
        if self.parallel.fsdp:
            yield from self.gather_parameters()
        yield from self.extension()
        yield from self.layers()
        yield from self.head()
        if self.parallel.runs_in_units:
            yield from self.exchange()
        yield from self.gradients()
        yield from self.norms()
        if self.parallel.update == "sharded" and not self.parallel.fsdp:
            yield from self.gather_parameters()

    def send(
        self, op: str, axes: tuple[str, ...], elements: int, count: int, what: str
    ) -> Iterator[Traffic]:
        """One kind of collective, if there is anyone to send to."""
        real = tuple(
            axis for axis in (DATA, STAGE, TENSOR) if axis in axes and self.sizes[axis] > 1
        )
        if real and elements and count:
            size = math.prod(self.sizes[axis] for axis in real)
            num_bytes = WORD * elements
            sent = sent_bytes(op, num_bytes, size)
            yield Traffic(op, real, num_bytes, sent, count, what)

    def gather_parameters(self) -> Iterator[Traffic]:
        for param in self.step.params:
            if param.split != param.computed:
                elements, what = param.computed.elements, f"parameter {param.name}"
                yield from self.send("all-gather", (DATA,), elements, 1, what)

    def extension(self) -> Iterator[Traffic]:
        """An embedding narrower than the layers is widened; its parts move to where the wider ones lie.

        In a pipeline that is the table, before the loop; else the embedded tokens.
        """
        n, own = self.sizes[TENSOR], self.step.model.embed_size // self.sizes[TENSOR]
        step = self.step
        rows = step.V if self.parallel.runs_in_units else step.t * step.b
        if n > 2 and step.width > 2 * own:  # too far for neighbours
            what = "embedding"
            yield from self.send("all-gather", (TENSOR,), rows * n * own, 1, what)
            pieces = [(step.width, "embedding's gradient")]
        else:
            pieces = []
            for part, what in ((own, "embedding"), (step.width, "embedding's gradient")):
                left = (n - 1) * (step.width - own)  # what the last device lacks
                for _ in range(n - 1):  # from neighbours further and further away
                    pieces.append((min(left, part), what))
                    left -= pieces[-1][0]
        for piece, what in pieces:
            yield from self.send("collective-permute", (TENSOR,), rows * piece, 1, what)

    def layers(self) -> Iterator[Traffic]:
        """Layers split over `tensor`: h is gathered at every step, what is multiplied by weights once."""
        step = self.step
        runs = step.units * self.parallel.num_groups * step.slots
        x, h = step.t * step.b * step.H, step.b * step.H
        repeat = 1 + (self.parallel.pipeline.remat and self.parallel.runs_in_units)
        yield from self.send("all-gather", (TENSOR,), x, repeat * runs, "inputs of layers")
        yield from self.send("all-gather", (TENSOR,), h, repeat * runs * step.t, "h of every step")
        lanes = step.schedule.lanes if self.parallel.runs_in_units else ()
        apart = [work for work in lanes if work.letter == "W"]
        times = apart[0].num_units if apart else 1
        yield from self.send(
            "all-gather", (TENSOR,), times * x, 2 * runs // times, "x and h for weight gradients"
        )
        if apart:
            beside = int(apart[0].busy_TS[:, -1].sum())
            yield from self.send("all-reduce", (TENSOR,), 1, beside, "order of W and B")
        yield from self.send("all-reduce", (TENSOR,), h, runs * step.t, "dh of every step")
        yield from self.send("all-reduce", (TENSOR,), x, runs, "dx of layers")

    def head(self) -> Iterator[Traffic]:
        """The head, and the loss over the parts of its vocabulary."""
        steps, runs = self.step.head_chunks
        y, tokens = steps * self.step.b * self.step.H, steps * self.step.b
        yield from self.send("all-gather", (TENSOR,), y, runs, "inputs of the head")
        yield from self.send("all-reduce", (TENSOR,), y, runs, "dy of the head")
        part = self.step.vocab
        if self.parallel.runs_in_units and part <= self.step.width:
            # Then it is no more to gather dlogits than y, and to exchange the parts of the kernel's gradient.
            whole = tokens * part * self.sizes[TENSOR]
            yield from self.send("all-gather", (TENSOR,), whole, runs, "dlogits")
            yield from self.send("all-to-all", (TENSOR,), self.step.H * part, 1, "head's gradient")
        for axis in (TENSOR, STAGE) if self.step.shares_head else (TENSOR,):
            yield from self.send("all-reduce", (axis,), tokens, runs, "largest logit")
            yield from self.send("all-reduce", (axis,), 2 * tokens, runs, "sums of the loss")

    def exchange(self) -> Iterator[Traffic]:
        """What stages send at every tick, and for every unit of a head that they share."""
        step, ticks = self.step, self.step.schedule.num_ticks
        x = step.t * step.b * step.width
        yield from self.send("collective-permute", (STAGE,), x, ticks, "activations, one stage up")
        yield from self.send("collective-permute", (STAGE,), x, ticks, "cotangents, one stage down")
        if step.shares_head:
            yield from self.send("all-reduce", (STAGE,), x, ticks, "inputs of the shared head")
            yield from self.send("all-reduce", (STAGE,), x, step.units, "dy of the shared head")

    def gradients(self) -> Iterator[Traffic]:
        """Their sums over `data`, and over the stages if all of them have a parameter."""
        in_units = self.parallel.runs_in_units
        over = {"first": (DATA, STAGE), "layers": (DATA,), "last": (DATA, STAGE)}
        if self.step.shares_head:
            over["last"] = (DATA,)
        for param in self.step.params:
            axes, elements = (
                over[param.part] if in_units else (DATA,),
                self.step.gradient_elements(param),
            )
            yield from self.send("all-reduce", axes, elements, 1, f"gradient {param.name}")
        loss = over["last"] if in_units else (DATA,)
        yield from self.send("all-reduce", loss, 2, 1, "loss and number of targets")

    def norms(self) -> Iterator[Traffic]:
        """Of the gradients: a sum over each split dim in its turn."""
        for param in self.step.params:
            for axes in (param.split if self.step.splits_update else param.computed).axes:
                yield from self.send("all-reduce", axes, 1, 1, "norm of gradients")
