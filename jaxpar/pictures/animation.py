"""The four ways to share a training step, moving: devices that wait, and then devices that work."""

import html
import json
from typing import NamedTuple

from jaxpar.pictures.blocks import IDLE, Block, block_svg, legend_html
from jaxpar.pictures.picture import STYLE, color_of, make_page
from jaxpar.pictures.timeline import blocks_of
from jaxpar.pipeline.schedule import make_schedule

ROW, LEFT, WIDTH = 30, 118, 696  # pixels: of a device's row, before the timeline, of it
ICON = 40


class Strategy(NamedTuple):
    """What every device does in one step, and what it holds.

    Attributes:
      name, words: title, and what is sent.
      blocks: `stage` is the device; in units of the forward pass of one layer.
      holds: device -> parts of the weights: (layer, first column, last column), columns from 0 to 1.
      stripes: units are of the whole batch.
    """

    name: str
    words: str
    blocks: list[Block]
    holds: list[list[tuple[int, float, float]]]
    stripes: bool

    @property
    def end(self) -> float:
        """When the step is done."""
        return max(block.start + block.cost for block in self.blocks)

    @property
    def busy(self) -> float:
        """Share of the time of all devices, until the end, in which they work."""
        work = sum(block.cost for block in self.blocks if block.label)
        return work / (self.end * len(self.holds))


def make_strategies(num_devices: int = 4, num_chunks: int = 2) -> list[Strategy]:
    """One training step of as many layers as devices, shared in four ways.

    All four do the same work: for each layer 1 forward and 2 backward. Sending takes no time here.

    Args:
      num_chunks: of time, in the pipeline; its microbatches are as many as devices.
    Raises:
      ValueError: a number is below 1.
    """
    n, devices = num_devices, range(num_devices)
    one_layer = [[(layer, 0.0, 1.0)] for layer in devices]
    alone = blocks_of(make_schedule("gpipe", 1, 1))  # all layers, a part of the work each
    on_each = [block._replace(stage=device) for device in devices for block in alone]
    whole = blocks_of(make_schedule("gpipe", n, 1))
    units = n * num_chunks
    pipeline = blocks_of(make_schedule("1f1b", n, n, num_chunks), 1 / units, 2 / units)
    return [
        Strategy(
            "model parallelism",
            "A layer on each device; activations go to the neighbour. One works, the others wait.",
            whole,
            one_layer,
            True,
        ),
        Strategy(
            "tensor parallelism",
            "A part of every layer on each device; all exchange at every time step of every layer.",
            on_each,
            [[(layer, d / n, (d + 1) / n) for layer in devices] for d in devices],
            True,
        ),
        Strategy(
            "data parallelism",
            "All layers on every device, for its rows of the batch; gradients are summed at the end.",
            [block._replace(color=color_of(block.stage)) for block in on_each],
            [[(layer, 0.0, 1.0) for layer in devices] for _ in devices],
            False,
        ),
        Strategy(
            "pipeline parallelism",
            f"A layer on each device, the batch in {n} parts, their sentences in {num_chunks}; pieces go to "
            f"the neighbour.",
            pipeline,
            one_layer,
            False,
        ),
    ]


def make_animation(num_devices: int = 4, num_chunks: int = 2) -> str:
    """The strategies as one file of HTML, which plays by itself; `#t=2.5` at its end shows that moment.

    Raises:
      ValueError: a number is below 1.
    """
    strategies = make_strategies(num_devices, num_chunks)
    last = max(strategy.end for strategy in strategies)
    colors = tuple(map(color_of, range(num_devices)))
    legend = legend_html(
        (
            (colors, "rows of the batch; stripes: all of them at once"),
            ((), "paler: later in the sentences"),
            ((), "dark foot: backward pass, twice the work"),
            ((IDLE,), "idle"),
            ((), "left: the part of the weights that a device holds"),
        )
    )
    panels = "".join(_panel(i, s, last) for i, s in enumerate(strategies))
    body = (
        f'<div class="jaxpar"><style>{STYLE}\n{_STYLE}</style>'
        f"<h1>One training step, {num_devices} layers, {num_devices} devices, four ways to share it</h1>"
        f"{legend}"
        f'<p class="controls"><button type="button">pause</button> <input type="range" min="0" '
        f'max="{last:g}" step="any" value="{last:g}" aria-label="time"> <output></output></p>{panels}'
        f"<p>Time: 1 is the forward pass of one layer over the whole batch. Devices of a pipeline keep step. "
        f"What is sent takes no time in this picture.</p><script>{_SCRIPT}</script></div>"
    )
    return make_page("Four ways to share a training step", body)


def _panel(number: int, strategy: Strategy, last: float) -> str:
    n, unit, width = len(strategy.holds), WIDTH / last, LEFT + WIDTH + 16
    stripes = tuple(map(color_of, range(n))) if strategy.stripes else ()
    bars = "".join(
        block_svg(
            block,
            LEFT + block.start * unit,
            ROW * block.stage,
            block.cost * unit,
            ROW,
            labelled=False,
            stripes=stripes,
        )
        for block in strategy.blocks
    )
    devices = "".join(
        f'<g class="light" transform="translate(0 {ROW * d})">'
        f'<text x="0" y="{ROW / 2 + 4:g}">device {d}</text>'
        f"{_icon(strategy.holds[d], n)}</g>"
        for d in range(n)
    )
    height, end = ROW * n, LEFT + strategy.end * unit
    ticks = "".join(
        f'<path class="tick" d="M{(x := LEFT + t * unit):g} {height}v4"/>'
        f'<text class="dim" x="{x:g}" y="{height + 15}" text-anchor="middle">{t}</text>'
        for t in range(int(last) + 1)
    )
    work = [
        [[b.start, b.start + b.cost] for b in strategy.blocks if b.stage == d and b.label]
        for d in range(n)
    ]
    data = html.escape(json.dumps({"end": strategy.end, "unit": unit, "work": work}))
    return (
        f'<section data-strategy="{data}"><h2>{strategy.name} <output>{_numbers(strategy)}</output></h2>'
        f'<p>{strategy.words}</p><svg width="{width}" viewBox="0 0 {width} {height + 20}" role="img" '
        f'aria-label="{strategy.name}: {_numbers(strategy)}">'
        f'<defs><g id="bars{number}">{bars}</g><clipPath id="past{number}">'
        f'<rect class="past" x="{LEFT}" y="0" width="{WIDTH}" height="{height}"/></clipPath></defs>'
        f'{devices}{ticks}<use href="#bars{number}" opacity=".2"/>'
        f'<use href="#bars{number}" clip-path="url(#past{number})"/>'
        f'<path class="end" d="M{end:g} 0v{height}"/>'
        f'<path class="now" d="M{LEFT} 0v{height}"/></svg></section>'
    )


def _icon(parts: list[tuple[int, float, float]], num_layers: int) -> str:
    """The layers, the first at the bottom, and what of them a device holds."""
    high = (ROW - 6) / num_layers
    x0 = LEFT - ICON - 14
    frame = "".join(
        f'<rect class="layer" x="{x0}" y="{3 + i * high:.1f}" width="{ICON}" height="{high - 2:.1f}"/>'
        for i in range(num_layers)
    )
    return frame + "".join(
        f'<rect class="held" x="{x0 + ICON * start:.1f}" y="{3 + (num_layers - 1 - layer) * high:.1f}" '
        f'width="{ICON * (stop - start):.1f}" height="{high - 2:.1f}"/>'
        for layer, start, stop in parts
    )


def _numbers(strategy: Strategy) -> str:
    return f"busy {strategy.busy:.0%}, done at {strategy.end:.1f}"


_STYLE = """\
.jaxpar{max-width:900px;margin:auto}
.jaxpar svg{max-width:100%;height:auto}
.jaxpar h1{font-size:20px;margin:4px 0 8px}
.jaxpar h2{font-size:15px;margin:16px 0 0}
.jaxpar h2 output{font-weight:400;color:var(--axis);margin-left:10px;font-variant-numeric:tabular-nums}
.jaxpar .controls{display:flex;gap:10px;align-items:center;color:var(--fg)}
.jaxpar .controls button{width:64px}
.jaxpar .controls input{flex:1;max-width:560px}
.jaxpar .layer{fill:none;stroke:var(--line)}
.jaxpar .held{fill:var(--dim)}
.jaxpar .busy .held{fill:var(--axis)}
.jaxpar .light text{fill:var(--dim)}
.jaxpar .light.busy text{fill:var(--axis);font-weight:700}
.jaxpar .end{stroke:var(--fg);stroke-width:1.5}
.jaxpar .now{stroke:var(--warn);stroke-width:2}"""

# Without it, or with motion switched off, the page shows the whole step.
_SCRIPT = """
const root = document.querySelector(".jaxpar");
const [button, slider, clock] = root.querySelector(".controls").children;
const last = +slider.max, rest = 1.5;  // seconds a unit of time, and at the end
const panels = [...root.querySelectorAll("section")].map(node => ({
  ...JSON.parse(node.dataset.strategy), node, says: node.querySelector("output"),
  past: node.querySelector(".past"), now: node.querySelector(".now"), lights: node.querySelectorAll(".light"),
}));
function draw(t) {
  slider.value = t;
  clock.textContent = "time " + t.toFixed(1);
  for (const p of panels) {
    const until = Math.min(t, p.end);
    let worked = 0;
    p.work.forEach((spans, device) => {
      worked += spans.reduce((sum, [a, b]) => sum + Math.max(0, Math.min(until, b) - a), 0);
      p.lights[device].classList.toggle("busy", spans.some(([a, b]) => a <= t && t < b));
    });
    const share = until ? worked / (until * p.work.length) : 0;
    p.says.textContent = `busy ${Math.round(100 * share)}%` +
      (t >= p.end ? `, done at ${p.end.toFixed(1)}` : "");
    p.past.setAttribute("width", until * p.unit);
    p.now.setAttribute("transform", `translate(${until * p.unit} 0)`);
  }
}
let time = last, before = null, playing = false;
function frame(now) {
  if (!playing) return;
  if (before !== null) time += (now - before) / 1000;
  if (time > last + rest) time = 0;
  before = now;
  draw(Math.min(time, last));
  requestAnimationFrame(frame);
}
function play(on) {
  playing = on;
  before = null;
  button.textContent = on ? "pause" : "play";
  if (on) requestAnimationFrame(frame);
}
button.onclick = () => play(!playing);
slider.oninput = () => { play(false); time = +slider.value; draw(time); };
const asked = /t=([0-9.]+)/.exec(location.hash);
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
time = asked ? Math.min(+asked[1], last) : still ? last : 0;
draw(time);
play(!asked && !still);
"""
