"""The commands: what each takes, and what it runs, which is imported then. Those of tasks are beside them."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Fixed, Positional, arg

from jaxpar.base.checks import require
from jaxpar.cli.command import Command, Options, Switch, TrainedOptions
from jaxpar.config import Parallel, TrainConfig
from jaxpar.mesh import MeshConfig
from jaxpar.model.task import Settings, Task

if TYPE_CHECKING:
    from jaxpar import planning
    from jaxpar.training.weights import Start

# Pictures of a task's step, and those that need no task.
PICTURES = ("schedule", "timeline", "parallelisms", "memory", "bytes")
PICTURES_OF_RUNS = ("curves",)

# What --mesh auto stands for until the planner has chosen.
AUTO = MeshConfig(data=-1)


def read_mesh(text: str) -> MeshConfig:
    """The mesh of a text, or `AUTO`."""
    return AUTO if text == "auto" else MeshConfig.parse(text)


@dataclasses.dataclass(frozen=True)
class TaskOptions(Options):
    """Options of commands that are about a task.

    Attributes:
      config_file: a file of settings; options given here override it.
    """

    config_file: Annotated[str | None, arg(name="config", metavar="FILE.toml")] = None
    task: Annotated[Task, arg(name="")] = dataclasses.field(kw_only=True)
    parallel: Annotated[Parallel, Fixed] = dataclasses.field(kw_only=True)
    train: Annotated[TrainConfig, Fixed] = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class RunOptions(TaskOptions):
    """Options of commands that are about a task on a mesh.

    Attributes:
      devices: numbers of the devices to use; by default all of them.
    """

    devices: tuple[int, ...] | None = None
    parallel: Annotated[Parallel, arg(name="")] = dataclasses.field(kw_only=True)
    train: TrainConfig = dataclasses.field(kw_only=True)

    @property
    def settings(self) -> Settings:
        """On the devices that are named."""
        parallel = self.parallel
        if self.devices is not None:
            mesh = dataclasses.replace(parallel.mesh, devices=self.devices)
            parallel = dataclasses.replace(parallel, mesh=mesh)
        return Settings(self.task, parallel, self.train)


@dataclasses.dataclass(frozen=True)
class Train(RunOptions):
    r"""Trains a model and evaluates it: a language model, or yours.

    Ctrl-C stops it after the current step, with its state saved; --resume continues. --mesh auto plans, and
    takes the mesh and pipeline that are quickest here. The exit code is 0 at the end, 2 after a mistake of
    yours, 3 if a loss or gradient was not finite (--train.nonfinite), and 128 and its number after a
    signal.

    Attributes:
      start: begin with these weights: a run's folder, a file, index or folder of safetensors, or a checkpoint
        of Orbax.
      start_rename: what the weights are called there and here, as PATTERN=NAME: 'encoder\.(.*)=embedding.\1'.
      start_ignore: patterns for names of weights there that are ignored: 'layers\.[45]\..*'.
      resume: continue the run in --train.out-dir, or the latest one, with its task and settings.
      resume_or_begin: continue the run in --train.out-dir, or begin it there: one command for every start
        of a job.
      overwrite: remove the run that is in --train.out-dir.
      elastic: if the mesh does not fit the available devices, take another one; so runs continue with those
        left.
      memory: memory of a device, such as 16GB: a layout that needs more, by the compiler's number, is
        refused.
      profile: write a trace of steps 3 to 5 into the run's folder, for ui.perfetto.dev.
    """

    start: Annotated[str | None, arg(metavar="PATH")] = None
    start_rename: Annotated[tuple[str, ...], arg(metavar="[PATTERN=NAME ...]")] = ()
    start_ignore: Annotated[tuple[str, ...], arg(metavar="[PATTERN ...]")] = ()
    resume: Switch = False
    resume_or_begin: Switch = False
    overwrite: Switch = False
    elastic: Switch = False
    memory: Annotated[str | None, arg(metavar="SIZE")] = None
    profile: Switch = False

    def run(self) -> int:
        """The exit code: 0, or 128 and the number of the signal that stopped it."""
        fact = "--resume-or-begin and --overwrite exclude each other"
        require(not (self.resume_or_begin and self.overwrite), f"{fact}\nFix: leave one out.")
        from jaxpar.training.fit import choose_folder, fit

        if self.parallel.mesh is AUTO and not self.resume:  # before the minutes that a plan takes
            choose_folder(self.train.out_dir, resume=False, overwrite=self.overwrite)
        goes_on = self.resume and self.resume_or_begin
        result = fit(
            *self._settled(), start=None if goes_on else self._start(), resume=self.resume,
            overwrite=self.overwrite, profile=self.profile,
        )  # fmt: skip
        return 128 + result.stopped_by if isinstance(result.stopped_by, int) else 0

    def _start(self) -> "Start | None":
        """The weights to begin with."""
        from jaxpar.training.weights import Start

        if self.start is None:
            if self.start_rename or self.start_ignore:
                fact = "--start-rename and --start-ignore lack weights"
                raise ValueError(f"{fact}\nFix: add --start PATH.")
            return None
        if wrong := [pair for pair in self.start_rename if "=" not in pair]:
            raise ValueError(f"--start-rename {wrong[0]} has no =\nFix: write PATTERN=NAME.")
        pairs = (pair.rpartition("=") for pair in self.start_rename)
        return Start(self.start, tuple((old, new) for old, _, new in pairs), self.start_ignore)

    def _settled(self) -> Settings:
        """The settings with what the planner chooses, or holds against the memory."""
        import jax

        from jaxpar import planning

        task, parallel, train = self.settings
        plans, num_bytes = self.parallel.mesh is AUTO, _num_bytes(self.memory)
        if not plans and not self.elastic and num_bytes is None:
            return self.settings
        sized = task.resolve()
        if self.elastic:
            parallel, reason = planning.fit_devices(sized, parallel, train, keep=not plans)
            if reason and jax.process_index() == 0:
                print(f"mesh        {reason}")
            if parallel.mesh.data == 1 != self.parallel.mesh.data:
                # Nothing to split over at this start; at the next one there may be.
                update = "host" if parallel.update == "host" else "replicated"
                parallel = dataclasses.replace(parallel, fsdp=False, update=update)
        elif plans and self.devices is not None:
            raise ValueError("--mesh auto takes all devices\nFix: leave out --devices.")
        elif plans:
            parallel = _plan(Settings(sized, parallel, train), None, num_bytes).best.parallel
        if num_bytes is not None and not plans:
            machine = planning.find_machine(None, num_bytes)
            planning.check_fits(planning.estimate_step(sized, parallel, train, machine))
        return Settings(task, parallel, train)


@dataclasses.dataclass(frozen=True)
class Plan(TaskOptions):
    """Prints which mesh and pipeline are the fastest for a task, and why.

    Every layout is ranked by arithmetic; the first dozen are compiled for the machine, which need not be
    there, and run where it is.

    Attributes:
      machine: a TPU slice, such as v5e:4x8 or v5p:2x2x2, or GPUs as partitions x hosts x GPUs of each, such
        as h100:1x2x8; by default the devices that JAX has.
      memory: memory of a device, such as 16GB, instead of the machine's own.
    """

    machine: str | None = None
    memory: Annotated[str | None, arg(metavar="SIZE")] = None

    def run(self) -> int:
        """The exit code, 0."""
        from jaxpar.cli.options import train_command

        _compile_only(self.machine)
        # Shares and speeds are kept.
        parallel = dataclasses.replace(self.parallel, mesh=MeshConfig())
        settings = Settings(self.task.resolve(), parallel, self.train)
        ranking = _plan(settings, self.machine, _num_bytes(self.memory))
        chosen = Settings(self.task, ranking.best.parallel, self.train)
        print(f"\nTo train with the first: {train_command(chosen, self.simulate)}")
        return 0


@dataclasses.dataclass(frozen=True)
class BatchOptions(TrainedOptions):
    """Options of commands that run a trained model on data.

    Attributes:
      batch_size: rows of a batch, if not as in training: 1 reads a text as one stream.
      seq_len: time steps of a window, if not as in training.
    """

    batch_size: int | None = None
    seq_len: int | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """Those that are given."""
        sizes = {"batch_size": self.batch_size, "seq_len": self.seq_len}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclasses.dataclass(frozen=True)
class Evaluate(BatchOptions):
    """Prints how good a trained model is on the validation and test data of its run.

    On one device, or on any --mesh.
    """

    def run(self) -> int:
        """The exit code, 0."""
        import jax

        from jaxpar.base.console import make_console
        from jaxpar.training.loaded import evaluate_run
        from jaxpar.training.progress import evaluation_table
        from jaxpar.training.run_folder import RunFolder

        self.start_processes()
        folder = RunFolder(self.run_dir)
        evaluations = evaluate_run(folder, self.mesh, best=self.best, **self.sizes)
        if jax.process_index() == 0:
            make_console().print(evaluation_table(evaluations))
        return 0


@dataclasses.dataclass(frozen=True)
class Export(TrainedOptions):
    """Writes the weights of a trained model as safetensors, by the names of its parameters.

    More than 5 GB become several files and model.safetensors.index.json, as Hugging Face's tools have them.

    Attributes:
      output: the file, such as model.safetensors.
      dtype: of all floating-point numbers; by default as they are.
      torch: names and layout of torch.nn.LSTM or GRU, for a language model (lm) of such layers.
    """

    output: Annotated[str, arg(aliases=["-o"], metavar="FILE")] = dataclasses.field(kw_only=True)
    dtype: Literal["bfloat16"] | None = None
    torch: Switch = False

    def run(self) -> int:
        """The exit code, 0."""
        import jax

        from jaxpar.training.loaded import check_export, load_run

        self.start_processes()
        check_export(self.output)
        run = load_run(self.run_dir, self.mesh, best=self.best)
        written = run.export(self.output, dtype=self.dtype, torch=self.torch)
        if jax.process_index() == 0:
            files = ", ".join(map(str, written))
            print(f"wrote {files}: the weights of {run.folder} after step {run.step}")
        return 0


@dataclasses.dataclass(frozen=True)
class Predict(BatchOptions):
    """Writes what a trained model predicts for each row of some data, in the order of the data.

    A model says what that is by its method predict: a language model gives the log-likelihood of each token.
    Each is a file NAME.npy. On one device, or on any --mesh.

    Attributes:
      data: a split, such as test, or what else the task's make_batches knows; of a language model also a
        file of text.
      out: the folder, a new one.
    """

    data: Annotated[str, Positional, arg(metavar="DATA")] = dataclasses.field(kw_only=True)
    out: Annotated[str, arg(aliases=["-o"], metavar="FOLDER")] = dataclasses.field(kw_only=True)

    def run(self) -> int:
        """The exit code: 0, or 128 and the number of the signal that stopped it."""
        import jax

        from jaxpar.hosts.stopping import Interrupted
        from jaxpar.training.loaded import load_run
        from jaxpar.training.predict import check_out

        self.start_processes()
        check_out(self.out)
        run = load_run(self.run_dir, self.mesh, best=self.best)
        try:
            outputs = run.predict(self.data, self.out, **self.sizes)
        except Interrupted as interrupted:
            if jax.process_index() == 0:
                print(interrupted, file=sys.stderr)
            return 128 + interrupted.signal
        if jax.process_index() == 0:
            for name, array in outputs.items():
                print(f"{Path(self.out) / name}.npy: {array.dtype}{list(array.shape)}")
        return 0


@dataclasses.dataclass(frozen=True)
class Inspect(RunOptions):
    """Prints what the compiled training step sends between devices, its FLOPs and its memory.

    Nothing is trained.

    Attributes:
      machine: one that need not be there, to compile for, as of plan.
      json: print it as JSON, with all that is known of each collective.
      compare: print estimates next to the compiled program, and a few measured steps where the devices are
        there.
    """

    machine: str | None = None
    json: Switch = False
    compare: Switch = False

    def run(self) -> int:
        """The exit code, 0."""
        from jaxpar import planning
        from jaxpar.planning.compiled import compile_step, setup_on

        _compile_only(self.machine)
        if self.compare:
            _show(planning.compare(planning.estimate_step(*self.settings, self.machine)))
            return 0
        machine = planning.find_machine(self.machine)
        report = compile_step(setup_on(self.settings, machine), machine, runs=False)
        if isinstance(report, str):
            fact = f"the compiler of {machine.name} refuses this step: {report}"
            raise ValueError(f"{fact}\nFix: use what plan finds, or another machine.")
        if self.json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            _show(report)
        return 0


@dataclasses.dataclass(frozen=True)
class Plot(RunOptions):
    """Draws a picture of a task's step, into a file or the terminal; or of runs.

    Kinds: "schedule", what each stage does when, by --mesh and --pipeline; "timeline", what each stage did
    when in a real step, beside its schedule; "parallelisms", data, tensor, model and pipeline parallelism on
    all devices, each with its estimated time, and with memory and bytes of its compiled step, as an
    animation; "memory" of a device, by kind, and "bytes" that a device sends, by axis, for each of --meshes.
    Without a task: "curves", the losses of runs (plot curves runs/0001 runs/0002).

    Attributes:
      output: an .svg, .png, .pdf or .html; without one the first three are shown here.
      meshes: meshes to compare, such as dp8 tp8 pp4dp2; without them, --mesh.
      machine: of parallelisms, one that need not be there, as of plan.
    """

    kind: Annotated[str, Fixed] = dataclasses.field(kw_only=True)
    output: Annotated[str | None, arg(aliases=("-o",), metavar="FILE")] = None
    meshes: Annotated[tuple[str, ...], arg(metavar="SHAPES")] = ()
    machine: str | None = None

    def run(self) -> int:
        """The exit code, 0."""
        from jaxpar.pictures.plot import plot_step

        _compile_only(self.machine)
        meshes = {shape: MeshConfig.parse(shape) for shape in self.meshes}
        picture = plot_step(self.kind, self.settings, meshes, self.output, self.machine)
        if isinstance(picture, Path):
            print(f"wrote {picture}")
        else:
            _show(picture)
        return 0


@dataclasses.dataclass(frozen=True)
class PlotRuns(Options):
    """Draws the losses of runs into a file.

    Attributes:
      runs: their folders.
      output: an .svg, .png, .pdf or .html.
    """

    kind: Annotated[str, Fixed] = dataclasses.field(kw_only=True)
    runs: Annotated[tuple[str, ...], Positional, arg(metavar="[RUN_DIR ...]")] = ()
    output: Annotated[str | None, arg(aliases=("-o",), metavar="FILE")] = None

    def run(self) -> int:
        """The exit code, 0."""
        from jaxpar.pictures.plot import plot_runs

        print(f"wrote {plot_runs(self.runs, self.output)}")
        return 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """Runs train, evaluate, predict or export in several processes.

    Such as: launch --processes 2 --devices-per-process 4 -- train lm --mesh dp2pp2tp2

    Attributes:
      command: after --: the command, such as train lm, and its arguments.
      processes: number of processes.
      devices_per_process: devices of each: simulated ones, or with --on ray those of --platform.
      on: start them on the Ray cluster that RAY_ADDRESS names, or that this machine is part of.
      platform: devices of the nodes of a Ray cluster.
      elastic: when processes die, continue with the others from the last checkpoint; with more at the next
        start.
      min_processes: with fewer than this an elastic run waits for its next start.
      debug: print the traceback of an error, not just its message.
    """

    command: Positional[tuple[str, ...]]
    processes: int = 2
    devices_per_process: int = 1
    on: Literal["ray"] | None = None
    platform: Literal["gpu", "cpu"] = "gpu"
    elastic: Switch = False
    min_processes: int = 1
    debug: Switch = False

    def run(self) -> int:
        """The exit code: 0, or that of the first process that failed."""
        from jaxpar.hosts.launch import launch
        from jaxpar.hosts.on_ray import OnRay

        what = self.command, self.processes, self.devices_per_process
        on = OnRay(self.platform) if self.on else None
        return launch(*what, elastic=self.elastic, min_processes=self.min_processes, launcher=on)


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Prints the versions, devices and memory of this machine, and what is missing on it.

    Attributes:
      debug: print the traceback of an error, not just its message.
    """

    debug: Switch = False

    def run(self) -> int:
        """The exit code: 1 if there is an error, else 0."""
        from jaxpar.cli import doctor

        return doctor.main()


# By their names.
_ALL = (Train, Plan, Evaluate, Predict, Export, Inspect, Plot, Launch, Doctor)
COMMANDS: dict[str, type[Command]] = {each.__name__.lower(): each for each in _ALL}


def _compile_only(machine: str | None) -> None:
    """Keeps JAX from looking for devices like those that are only compiled for."""
    if machine is not None:
        import jax

        jax.config.update("jax_platforms", "cpu")


def _plan(settings: Settings, machine: str | None, num_bytes: float | None) -> "planning.Ranking":
    """The ranking, shown; stderr has what is done meanwhile."""
    from jaxpar import planning

    found = planning.find_machine(machine, num_bytes)
    steps = planning.plan_in_steps(*settings, found)
    first = next(steps)
    _ = first.best  # raises if none fits
    *_, last = first, *steps
    _show(last)
    return last


def _num_bytes(size: str | None) -> float | None:
    """Of a size such as 16GB."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMGT]?)B", size)
    if match is None:
        fact = f"--memory {size} is no size"
        raise ValueError(f"{fact}\nFix: write a number and its unit, such as 16GB.")
    return float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]


def _show(picture: Any) -> None:
    """As wide as the terminal, in letters that it has."""
    from jaxpar.base.console import make_console, rendered

    print(rendered(picture, make_console()))
