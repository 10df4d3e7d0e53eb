"""Which mesh, and how a step is cut on it: every config that some devices allow, ranked by predicted time.

Nothing is compiled and no device is needed. What saves memory at a price in time (recomputing, FSDP, an
optimizer on the host) is looked at only where a config does not fit without it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from rich.table import Table

from jaxpar.axes import STAGE
from jaxpar.config import Config, replace_train
from jaxpar.display import format_bytes, format_seconds
from jaxpar.mesh import MeshConfig
from jaxpar.pictures.picture import Tables, make_table
from jaxpar.pipeline.placement import balance, balance_ticks
from jaxpar.planning.calibration import HERE, find_machine, measure_pieces
from jaxpar.planning.cost import Cost, pieces_of, predict_step, sending_seconds, stage_seconds
from jaxpar.planning.hardware import Hardware

# Cuts of the batch and of time that are tried differ by this factor at least.
_NEXT_CUT = 1.5
# Of the best configs, so many are made of measured pieces in the end.
_NUM_MEASURED = 4
# With so many units for every stage the bubble is 1/17 at most: finer cuts have little to gain.
_UNITS_PER_STAGE = 16


@dataclasses.dataclass(frozen=True)
class Ranking(Tables):
    """What `plan` found; `print` it, or read it.

    Attributes:
      hardware, num_devices: that it is for.
      costs: of the configs that fit, the quickest first.
      num_configs: that were looked at.
      smallest: of the config that needs the least memory, of those that do not fit; None if all fit.
    """

    hardware: Hardware
    num_devices: int
    costs: tuple[Cost, ...]
    num_configs: int
    smallest: Cost | None

    @property
    def best(self) -> Cost:
        """The quickest.

        Raises:
          ValueError: none fits.
        """
        if self.costs:
            return self.costs[0]
        assert self.smallest is not None
        raise ValueError(
            f"none of {self.num_configs:,} configs fits in {format_bytes(self.hardware.memory_bytes)} on "
            f"{self.num_devices} devices of {self.hardware.name}; the smallest, "
            f"{describe(self.smallest.config)}, needs {format_bytes(self.smallest.memory.total)} on each; "
            f"use more devices, or a smaller model or batch"
        )

    @property
    def best_of_meshes(self) -> tuple[Cost, ...]:
        """The quickest of every mesh, the quickest first."""
        first: dict[MeshConfig, Cost] = {}
        for cost in self.costs:
            first.setdefault(cost.config.mesh, cost)
        return tuple(first.values())

    def explain(self) -> str:
        """In words: what limits the best, and what the best on another mesh would cost.

        Raises:
          ValueError: none fits.
        """
        best, *others = self.best_of_meshes or (self.best,)
        config, seconds = best.config, _seconds(best)
        parts = _words(best, self.hardware)
        ordered = sorted(parts, key=lambda name: -getattr(seconds, name))
        shares = [
            f"{parts[name]} ({getattr(seconds, name) / seconds.total:.0%})" for name in ordered
        ]
        tokens = config.data.batch_size * config.data.seq_len
        lines = [
            f"Use {describe(config)}: {format_seconds(seconds.total)} a step, {tokens / seconds.total:,.0f} "
            f"tokens/s, {format_bytes(best.memory.total)} of {format_bytes(self.hardware.memory_bytes)}.",
            f"What takes most of its time: {shares[0]}; then {shares[1]}.",
        ]
        if others:
            other = _seconds(others[0])
            more = {name: getattr(other, name) - getattr(seconds, name) for name in parts}
            worst, better = (pick(more, key=more.__getitem__) for pick in (max, min))
            theirs = _words(others[0], self.hardware)
            line = (
                f"The runner-up, {describe(others[0].config)}, would take {format_seconds(other.total)}, "
                f"{other.total / seconds.total - 1:+.0%}: {format_seconds(more[worst])} more for "
                f"{theirs[worst]}"
            )
            if more[better] < 0:
                line += f", {format_seconds(-more[better])} less for {theirs[better]}"
            lines.append(line + ".")
        too_large = self.num_configs - len(self.costs)
        if too_large:
            lines.append(f"{too_large:,} of {self.num_configs:,} configs do not fit in memory.")
        return "\n".join(lines)

    def parts(self) -> Iterator[Table | str]:
        """See `Tables`."""
        yield (
            f"{self.num_devices} devices of {self.hardware.name}; {self.num_configs:,} configs, "
            f"the best of each mesh:\n"
        )
        columns = ("layers", "head", "bubble", "ticks", "sending", "update")
        table = make_table("config", ">step", *(f">{name}" for name in columns), ">memory")
        for cost in self.best_of_meshes[:12]:
            seconds = _seconds(cost)
            table.add_row(
                describe(cost.config),
                format_seconds(seconds.total),
                *(f"{getattr(seconds, name) / seconds.total:.0%}" for name in columns),
                format_bytes(cost.memory.total),
            )
        yield table
        yield "\n" + self.explain()

    __repr__ = Tables.__repr__


def plan(config: Config, num_devices: int, hardware: Hardware) -> Ranking:
    """Every way to run a config's training step on so many devices, ranked by predicted time.

    All shapes of the mesh, microbatches, chunks of time, and both heads are tried, with balanced placements
    and the 1F1B schedule; recomputation, FSDP and the places of the optimizer where memory asks for them, or
    where they are quicker.

    Args:
      config: its model, batch and optimizer; with `model.vocab_size` set. Its mesh and pipeline are not
        looked at, but for the devices that the mesh names.
      num_devices: all of them are used.
    Raises:
      ValueError: no mesh of so many devices fits the sizes of the model and the batch, or the config has
        something that is not modelled (see `predict_step`).
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}: must be positive")
    fitting: list[Cost] = []
    smallest: Cost | None = None
    num_configs, refused = 0, None
    for cut in _cuts_of(config, num_devices):
        for saving in _SAVINGS:
            saved = saving(cut)
            if saved is None:
                continue
            try:
                cost = predict_step(saved, hardware)
            except ValueError as error:
                refused = refused or error
                break
            num_configs += 1
            if cost.memory.total <= hardware.memory_bytes:
                fitting.append(cost)
                if saving is not _SAVINGS[0]:  # what follows is slower
                    break
            elif smallest is None or cost.memory.total < smallest.memory.total:
                smallest = cost
    if not num_configs:
        raise ValueError(f"no mesh of {num_devices} devices fits: {refused}")
    fitting.sort(key=lambda cost: _seconds(cost).total)
    return Ranking(hardware, num_devices, tuple(fitting), num_configs, smallest)


def plan_here(config: Config, memory_bytes: float | None = None) -> Ranking:
    """`plan` for the devices that JAX has; what the best are made of is measured on them, once for all times.

    Args:
      memory_bytes: of a device, if it is not what the machine says.
    Raises:
      ValueError: as of `plan`, or there are several processes.
      OSError: the user's cache folder cannot be written.
    """
    machine = find_machine(HERE, memory_bytes)
    while True:
        ranking = plan(config, jax.device_count(), machine)
        best = [cost.config for cost in ranking.costs[:_NUM_MEASURED]]
        measured = measure_pieces(machine, [w for c in best for w in pieces_of(c).values()])
        if measured is machine:
            return ranking
        machine = measured


def place(
    config: Config, hardware: Hardware, by: Literal["time", "memory"] = "time"
) -> tuple[int, ...]:
    """The placement of a config's layers by the time that each takes, or by the memory that stages need.

    Either way no device gets more layers than fit: each has room for as many as the fullest.

    Args:
      hardware: whose times they are; `measure_pieces` makes them those of this machine.
      by: ticks shall be the shortest, the head (on the last stage) and the embedding (on the first) included;
        or the fullest stage shall have the fewest layers.
    Raises:
      ValueError: no placement fits in the memory, or as of `predict_step`.
    """
    num_layers, num_places = config.model.num_layers, config.mesh.stage * config.num_groups
    if config.mesh.stage == 1:
        return config.placement
    most = -(-num_layers // num_places)  # of an even placement, on the fullest stage
    check_fits(_placed(config, most), hardware)
    while most <= num_layers - num_places and _fits(_placed(config, most + 1), hardware):
        most += 1
    costs = {"forward": 0.0}  # then the fullest stage alone counts
    if by == "time":
        parts = stage_seconds(config, hardware)
        costs = dataclasses.asdict(parts)
    return balance_ticks(num_layers, num_places, max_layers=most, **costs)


def _placed(config: Config, most: int) -> Config:
    """With so many layers on the first stage, and the others spread evenly."""
    places = config.mesh.stage * config.num_groups - 1
    rest = balance([1.0] * (config.model.num_layers - most), places)
    pipeline = dataclasses.replace(config.pipeline, placement=(most, *rest))
    return dataclasses.replace(config, pipeline=pipeline)


def _fits(config: Config, hardware: Hardware) -> bool:
    return predict_step(config, hardware).memory.total <= hardware.memory_bytes


def check_fits(config: Config, hardware: Hardware) -> Cost:
    """The cost of a config's step, if a device has the memory for it.

    Raises:
      ValueError: it has not; with the three changes that cost the least time of those that make it fit.
    """
    cost = predict_step(config, hardware)
    if cost.memory.total <= hardware.memory_bytes:
        return cost
    found: list[tuple[float, str]] = []
    tried = [cost]
    fit_alone: set[str] = set()
    changes = list(_changes(config))
    pairs = itertools.combinations(changes, 2)
    for parts in (*((change,) for change in changes), *pairs):
        names = {name for name, _ in parts}
        if names & fit_alone:
            continue  # one is enough
        changed = config
        for _, change in parts:
            changed = change(changed)
        try:
            tried.append(predict_step(changed, hardware))
        except ValueError:
            continue
        if tried[-1].memory.total <= hardware.memory_bytes:
            fit_alone |= names if len(parts) == 1 else set()
            what = " and ".join(name for name, _ in parts)
            seconds = _seconds(tried[-1]).total
            size = format_bytes(tried[-1].memory.total)
            found.append((seconds, f"{what} ({size}, {format_seconds(seconds)} a step)"))
    parts = dataclasses.asdict(cost.memory).items()
    most = sorted(parts, key=lambda part: -part[1])[:2]
    message = (
        f"a step needs {format_bytes(cost.memory.total)} on a device ("
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in most)
        + f" ...), {hardware.name} has {format_bytes(hardware.memory_bytes)}; "
    )
    if not found:
        least = min(tried, key=lambda cost: cost.memory.total)
        raise ValueError(
            message
            + f"no two changes make it fit, the least is {format_bytes(least.memory.total)}; use more "
            f"devices, or a smaller model or batch"
        )
    raise ValueError(message + "use " + ", or ".join(text for _, text in sorted(found)[:3]))


def describe(config: Config) -> str:
    """How a config runs, in a line: its mesh, its pipeline, and what it does to save memory."""
    sizes, pipeline, train = config.mesh.sizes, config.pipeline, config.train
    short = {"data": "dp", "stage": "pp", "tensor": "tp"}
    words = ["".join(f"{short[axis]}{size}" for axis, size in sizes.items() if size > 1) or "dp1"]
    if config.runs_in_units:
        words.append(f"M={pipeline.num_microbatches}")
    if sizes[STAGE] > 1:
        words += [f"K={pipeline.num_chunks}", f"head={pipeline.head}"]
        if len(set(config.placement)) > 1:
            words.append(f"placement={','.join(map(str, config.placement))}")
    words += ["remat"] * (pipeline.remat and config.runs_in_units) + ["fsdp"] * train.fsdp
    return " ".join(words + [f"update={train.update}"] * (train.update != "replicated"))


# ---- what is tried ----


def _cuts_of(config: Config, num_devices: int) -> Iterator[Config]:
    """Meshes, and how the batch and time are cut on them; sizes may still not fit."""
    model, data = config.model, config.data
    for mesh in _meshes(num_devices, config.mesh.devices):
        stages = mesh.stage
        if (
            stages > model.num_layers
            or data.batch_size % mesh.data
            or model.hidden_size % mesh.tensor
        ):
            continue
        for M in _cuts(data.batch_size // mesh.data):
            for K in _cuts(data.seq_len) if stages > 1 else [1]:
                if _UNITS_PER_STAGE * stages < M * K:
                    continue
                for head in ("sharded", "last") if stages > 1 else ("sharded",):
                    pipeline = dataclasses.replace(
                        config.pipeline,
                        schedule="1f1b",
                        num_groups=1,
                        num_microbatches=M,
                        num_chunks=K,
                        placement="balanced",
                        head=head,
                        remat=False,
                    )
                    train = dataclasses.replace(config.train, fsdp=False, update="replicated")
                    yield dataclasses.replace(config, mesh=mesh, pipeline=pipeline, train=train)


def _meshes(num_devices: int, devices: tuple[int, ...] | None) -> Iterator[MeshConfig]:
    for data in _divisors(num_devices):
        for stage in _divisors(num_devices // data):
            yield MeshConfig(data, stage, num_devices // data // stage, devices)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _cuts(n: int) -> list[int]:
    """Divisors of n, each larger than the one before by a factor."""
    cuts = [1]
    for divisor in _divisors(n):
        if divisor >= _NEXT_CUT * cuts[-1]:
            cuts.append(divisor)
    return cuts


def _saving(remat: bool, **train: Any) -> Callable[[Config], Config | None]:
    """A config that saves memory so; None if it would save nothing."""

    def save(config: Config) -> Config | None:
        if (remat and not config.runs_in_units) or (
            config.mesh.data == 1 and train not in ({}, {"update": "host"})
        ):
            return None
        pipeline = dataclasses.replace(config.pipeline, remat=remat)
        return replace_train(dataclasses.replace(config, pipeline=pipeline), **train)

    return save


# From what takes the most memory to what takes the least time to pay for more of it.
_SAVINGS = tuple(
    _saving(remat, **train)
    for remat, train in itertools.product(
        (False, True), ({}, {"update": "sharded"}, {"fsdp": True}, {"update": "host"})
    )
)


def _changes(config: Config) -> Iterator[tuple[str, Callable[[Config], Config]]]:
    """Single changes of a config that may save memory, each with its name on the command line."""

    def change(part: str, **fields: Any) -> tuple[str, Callable[[Config], Config]]:
        text = " ".join(f"{part}.{k.replace('_', '-')} {v}" for k, v in fields.items())
        return f"--{text}", lambda config: dataclasses.replace(
            config, **{part: dataclasses.replace(getattr(config, part), **fields)}
        )

    pipeline, data = config.pipeline, config.data
    if not pipeline.remat and config.runs_in_units:
        yield "--pipeline.remat", change("pipeline", remat=True)[1]
    for M in _cuts(data.batch_size // config.mesh.data):
        if pipeline.num_microbatches < M:
            yield change("pipeline", num_microbatches=M)
    if config.mesh.stage > 1:
        for K in _cuts(data.seq_len):
            if pipeline.num_chunks < K:
                yield change("pipeline", num_chunks=K)
        if pipeline.head == "last":
            yield change("pipeline", head="sharded")
        if pipeline.schedule == "gpipe":
            yield change("pipeline", schedule="1f1b")
    if config.mesh.data > 1 and config.train.update == "replicated":
        yield change("train", update="sharded")
    if config.mesh.data > 1 and not config.train.fsdp:
        yield "--train.fsdp", change("train", fsdp=True)[1]
    if config.train.update != "host":
        yield change("train", update="host")
    for mesh in _meshes(config.mesh.num_devices, config.mesh.devices):
        if mesh != config.mesh:
            yield f"--mesh {mesh}", lambda config, mesh=mesh: dataclasses.replace(config, mesh=mesh)


# ---- words ----


def _seconds(cost: Cost):
    assert cost.seconds is not None  # predicted for hardware
    return cost.seconds


def _words(cost: Cost, hardware: Hardware) -> dict[str, str]:
    """What each part of `Seconds` is spent on."""
    config = cost.config
    work = pieces_of(config, on_cpu=hardware.platform == "cpu")["forward"]
    limit = {
        "flops": "the matmuls of the layers",
        "bytes": "the weights of the layers, read at every time step",
        "turns": "the time steps of the layers, each too small to fill a device",
    }[hardware.limit(work, config.model.dtype)]
    along: dict[tuple[str, ...], float] = {}
    for part in cost.traffic:
        seconds = sending_seconds(part, hardware, config.mesh.sizes)
        along[part.axes] = along.get(part.axes, 0.0) + seconds
    axes = max(along, key=along.__getitem__, default=())
    return {
        "layers": limit,
        "head": f"the head over {config.model.vocab_size:,} words",
        "bubble": f"stages that wait for each other (bubble {cost.bubble:.0%})",
        "ticks": f"the loop over {cost.num_ticks} ticks itself",
        "sending": "sending" + f", mostly over {' and '.join(axes)}" * bool(axes),
        "update": "the optimizer",
    }
