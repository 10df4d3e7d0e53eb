"""The commands: the options of each and what it runs. Commands of one task are in the task's module."""

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

# Stands for --mesh auto until the planner has chosen a mesh.
AUTO = MeshConfig(data=-1)


def read_mesh(text: str) -> MeshConfig:
    """The mesh of a text, or `AUTO`."""
    return AUTO if text == "auto" else MeshConfig.parse(text)


@dataclasses.dataclass(frozen=True)
class TaskOptions(Options):
    """Options of commands that take a task.

    Attributes:
      config_file: Config file. Options on the command line override it.
    """

    config_file: Annotated[str | None, arg(name="config", metavar="FILE.toml")] = None
    task: Annotated[Task, arg(name="")] = dataclasses.field(kw_only=True)
    parallel: Annotated[Parallel, Fixed] = dataclasses.field(kw_only=True)
    train: Annotated[TrainConfig, Fixed] = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class RunOptions(TaskOptions):
    """Options of commands that take a task and a mesh.

    Attributes:
      devices: Numbers of the devices to use, in the order of the mesh. By default all devices.
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
    r"""Train and evaluate a model: the built-in language model or your own task.

    Ctrl-C stops the run after the current step and saves its state; --resume continues it. --mesh auto runs
    the planner and trains with the fastest mesh and pipeline on your devices.

    Exit codes: 0 success, 2 wrong option or input, 3 NaN or infinity in a loss or gradient
    (--train.nonfinite), 128 + N stopped by signal N.

    Attributes:
      start: Initial weights, for fine-tuning: a run folder, a safetensors file, index or folder, or an Orbax
        checkpoint.
      start_rename: New names for the weights of --start, such as 'encoder\.(.*)=embedding.\1'. PATTERN is a
        regular expression.
      start_ignore: Weights of --start to leave out. Each PATTERN is a regular expression of names, such as
        layers\.[45]\..* for layers 4 and 5.
      resume: Continue the run in --train.out-dir, or the latest run, with its task and settings.
      resume_or_begin: Continue the run in --train.out-dir, or begin it if there is none. Lets a job use the
        same command for every start.
      overwrite: Remove the run in --train.out-dir and begin a new one.
      elastic: If the mesh doesn't fit the available devices, choose another mesh and continue.
      memory: Memory of a device, such as 16GB. If the compiled step needs more, training doesn't start.
      profile: Write a profile of steps 3 to 5 into the run folder. View it at ui.perfetto.dev.
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
    """Find the fastest mesh and pipeline for a task, and print why.

    All layouts are ranked by estimated step time. The best 12 are compiled for the target machine, which you
    don't need to have. They are timed if its devices are available.

    Attributes:
      machine: Target machine: a TPU slice, such as v5e:4x8 or v5p:2x2x2, or GPUs as PARTITIONSxHOSTSxGPUS,
        such as h100:1x2x8. By default the devices of this machine.
      memory: Memory of a device, such as 16GB, in place of the target machine's own.
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
        print(f"\nTo train with the first layout: {train_command(chosen, self.simulate)}")
        return 0


@dataclasses.dataclass(frozen=True)
class BatchOptions(TrainedOptions):
    """Options of commands that run a trained model on data.

    Attributes:
      batch_size: Rows of a batch. By default as in training; 1 reads a text as one stream.
      seq_len: Time steps of a window. By default as in training.
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
    """Evaluate a trained model on its validation and test data, and print the results.

    Runs on one device, or on the devices of --mesh.
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
    """Export the weights of a trained model to a safetensors file.

    More than 5 GB are split into several files with a model.safetensors.index.json, as Hugging Face tools
    expect them.

    Attributes:
      output: File to write, such as model.safetensors.
      dtype: Data type of all floating-point weights. By default each keeps its own.
      torch: Use the names and layout of torch.nn.LSTM or GRU, for a language model (lm) of such layers.
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
    """Write the predictions of a trained model for each row of the data, in order.

    Each output of the model becomes a file NAME.npy. A language model gives the log-likelihood of each token.
    Runs on one device, or on the devices of --mesh.

    Attributes:
      data: Data to predict: a split, such as test, or another name that the task can read. For a language
        model also a text file.
      out: New folder for the predictions.
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
    """Print the communication, FLOPs and memory of a compiled training step.

    Compiles the step, but trains nothing.

    Attributes:
      machine: Target machine to compile for, such as v5e:4x8 or h100:1x2x8 (you don't need to have it). By
        default the devices of this machine.
      json: Print the inspection report as JSON, with all details of each collective.
      compare: Print estimates next to the numbers of the compiled program. If the devices are available, also
        time a few steps.
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
            raise ValueError(f"{fact}\nFix: use a layout that plan finds, or another machine.")
        if self.json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            _show(report)
        return 0


@dataclasses.dataclass(frozen=True)
class Plot(RunOptions):
    """Draw a picture of a task's training step, or of the losses of runs.

    KIND is one of: "schedule", the planned pipeline schedule; "timeline", the measured times of a real step
    next to its schedule; "parallelisms", an animation that compares data, tensor, model and pipeline
    parallelism; "memory", the memory of a device by purpose; "bytes", the bytes that a device sends, by mesh
    axis; "curves", the losses of runs. Only curves takes no task (plot curves runs/0001 runs/0002).

    Attributes:
      output: File to write: .svg, .png, .pdf or .html. Without it, schedule, timeline and parallelisms are
        shown in the terminal.
      meshes: Meshes to compare in memory and bytes, such as dp8 tp8 pp4dp2. By default only --mesh.
      machine: Target machine for parallelisms, such as v5e:4x8 or h100:1x2x8 (you don't need to have it).
        By default the devices of this machine.
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
    """Draw the losses of runs into a file.

    Attributes:
      runs: Run folders.
      output: File to write: .svg, .png, .pdf or .html.
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
    """Run train, evaluate, predict or export in several processes.

    Example: launch --processes 2 --devices-per-process 4 -- train lm --mesh dp2pp2tp2

    Attributes:
      command: Command to run and its arguments, after --, such as -- train lm.
      processes: Number of processes.
      devices_per_process: Devices of each process: simulated devices, or with --on ray real devices of the
        kind --platform.
      on: Start the processes on a Ray cluster: the one that RAY_ADDRESS names, or the one of this machine.
      platform: Kind of devices to use on a Ray cluster.
      elastic: If processes die, continue with the others from the last checkpoint. Use more processes again
        at the next start.
      min_processes: Fewest processes for an elastic run. With fewer left, the run stops until you start it
        again.
      debug: Print the traceback of an error, not only its message.
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
    """Print versions, devices, memory and missing packages of this machine.

    Attributes:
      debug: Print the traceback of an error, not only its message.
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
        fact = f"--memory {size} is not a size"
        raise ValueError(f"{fact}\nFix: write a number and its unit, such as 16GB.")
    return float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]


def _show(picture: Any) -> None:
    """As wide as the terminal, in letters that it has."""
    from jaxpar.base.console import make_console, rendered

    print(rendered(picture, make_console()))
