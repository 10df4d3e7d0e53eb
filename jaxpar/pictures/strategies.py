"""Ways to share a training step: what every device holds and does, and when it waits."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpar.config import Parallel, PipelineConfig
from jaxpar.facts import ModelFacts
from jaxpar.forward import step_schedule
from jaxpar.layout import Layout
from jaxpar.mesh import MeshConfig
from jaxpar.pictures.style import color_of
from jaxpar.pictures.timeline import unit_colors
from jaxpar.pipeline.lanes import Block, Schedule
from jaxpar.pipeline.schedules import make_schedule
from jaxpar.task import find_task
from jaxpar.training.stage_table import stage_rows

# The model of MXNet's example, which was drawn with eight layers, an encoder and a decoder on several GPUs.
MXNETS_LSTM = {
    "num_layers": 8,
    "hidden_size": 400,
    "embed_size": 200,
    "vocab_size": 10_000,
    "batch_size": 20,
    "seq_len": 35,
}
PLACEMENTS = (
    (
        "the ends beside layers",
        "Two layers on each device, the embedding beside the first and the head beside the last.",
        "first, 0-1 | 2-3 | 4-5 | 6-7, last",
    ),
    (
        "the ends alone",
        "Embedding and head have devices of their own; the layers share the two between them.",
        "first | 0-3 | 4-7 | last",
    ),
)


class Strategy(NamedTuple):
    """What every device does in one step, and what it holds.

    Attributes:
      name, words: title, and what is sent.
      holds: which weights, of each device.
      blocks: `stage` is the device.
      colors: of their units, as a `Chart` takes them.
      weight_bytes, sent_bytes: what each device holds of weights, and what it sends to its neighbours in a
        step; () where no model is named.
    """

    name: str
    words: str
    holds: list[str]
    blocks: list[Block]
    colors: Mapping[int, tuple[str, ...]]
    weight_bytes: Sequence[int] = ()
    sent_bytes: Sequence[int] = ()

    @property
    def end(self) -> float:
        """When the step is done."""
        return max(block.start + block.cost for block in self.blocks)

    @property
    def busy(self) -> float:
        """Share of the time of all devices, until the end, in which they work."""
        return sum(map(self.busy_of, range(len(self.holds)))) / len(self.holds)

    def busy_of(self, device: int) -> float:
        """The same of one device."""
        return sum(block.cost for block in self.blocks if block.stage == device) / self.end


def make_strategies(num_devices: int = 4, num_chunks: int = 2) -> list[Strategy]:
    """One training step of as many layers as devices, shared in four ways.

    All four do the same work: for each layer 1 forward and 2 backward. Sending takes no time here. Time 1 is
    the forward pass of one layer.

    Args:
      num_chunks: of time, in the pipeline; its microbatches are as many as devices.
    Raises:
      ValueError: a number is below 1.
    """
    n, devices = num_devices, range(num_devices)

    def blocks_of(schedule: Schedule) -> list[Block]:
        cost = 1 / schedule.num_units
        return [block._replace(label="") for block in schedule.blocks((cost, 2 * cost))]

    stripes = dict.fromkeys(devices, tuple(map(color_of, devices)))
    a_layer, pipeline = [f"layer {d}" for d in devices], make_schedule("1f1b", n, n, num_chunks)
    all_layers = blocks_of(make_schedule("gpipe", 1, 1))
    on_each = [block._replace(stage=d, unit=d) for d in devices for block in all_layers]
    return [
        Strategy(
            "model parallelism",
            "A layer on each device; activations go to the neighbour. One works, the others wait.",
            a_layer,
            blocks_of(make_schedule("gpipe", n, 1)),
            stripes,
        ),
        Strategy(
            "tensor parallelism",
            "A part of every layer on each device; all exchange at every time step of every layer.",
            [f"part {device} of all layers" for device in devices],
            on_each,
            stripes,
        ),
        Strategy(
            "data parallelism",
            "All layers on every device, for its rows of the batch; gradients are summed at the end.",
            ["all layers"] * n,
            on_each,
            {device: (color_of(device),) for device in devices},
        ),
        Strategy(
            "pipeline parallelism",
            f"A layer on each device, the batch in {n} parts, their sentences in {num_chunks}; pieces go to "
            f"the neighbour.",
            a_layer,
            blocks_of(pipeline),
            unit_colors(pipeline),
        ),
    ]


def make_placements() -> list[Strategy]:
    """The two placements that MXNet drew for its LSTM, each in a pipeline of four devices.

    As its engine ran them: all time steps forward, one after the other through the devices, and then all
    backward. Work is FLOPs, of which an embedding has none; that of the head, both passes, is done as a time
    step leaves the last layer, as jaxpar does it. Time 1 is the forward pass of two layers.
    """
    facts = ModelFacts.of(find_task("lm")(**MXNETS_LSTM))
    strategies = []
    for name, words, placement in PLACEMENTS:
        pipeline = PipelineConfig("gpipe", 1, MXNETS_LSTM["seq_len"], placement=placement)
        layout = Layout(facts, Parallel(MeshConfig(stage=4), pipeline))
        schedule, places = step_schedule(layout.parallel), placement.split("|")
        forward, _ = layout.costs.layers[0]
        cost_2S = layout.costs.of_places(layout.placement) / (2 * forward * schedule.num_units)
        blocks = schedule.blocks([cost_S[None] for cost_S in cost_2S])
        rows = [[row for row in stage_rows(layout) if row.stage == d] for d in range(len(places))]
        up = [round(sum(row.sent_bytes for row in own) * schedule.num_units) for own in rows]
        strategies.append(
            Strategy(
                name,
                words,
                [place.strip() for place in places],
                [block._replace(label="") for block in blocks if block.cost],
                unit_colors(schedule),
                [sum(row.number * row.weight_bytes for row in own) for own in rows],
                [own + before for own, before in zip(up, [0, *up[:-1]], strict=True)],
            )
        )
    return strategies
