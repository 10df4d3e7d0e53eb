"""The commands of `python -m jaxpar`: what each takes, and what it runs."""

import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_type_hints

import jax
from tyro.conf import Fixed, FlagCreatePairsOff, Positional, arg

from jaxpar.analysis import inspect_step
from jaxpar.config import Adaptation, Parallel, TrainConfig, short_name
from jaxpar.display import Shown, format_bytes, format_count, make_console
from jaxpar.facts import ModelFacts
from jaxpar.fields import require_positive
from jaxpar.hosts import doctor
from jaxpar.hosts.agreement import agree
from jaxpar.hosts.distributed import start_processes
from jaxpar.hosts.launch import elastic_command, launch
from jaxpar.hosts.scripts import jobset_manifest, slurm_script
from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.pictures.picture import Drawing
from jaxpar.pictures.plot import plot
from jaxpar.planning import (
    HERE,
    check_fits,
    compare_here,
    compiled_cost,
    find_machine,
    fit_devices,
    measure_pieces,
    place,
    plan,
    plan_here,
    predict_step,
)
from jaxpar.planning.shape import StepShape
from jaxpar.setup import Setup
from jaxpar.task import Settings, Task, spec_of
from jaxpar.tasks.lm import LM
from jaxpar.tasks.lm.sample import sample
from jaxpar.tasks.lm.weights import NAMES, export_weights, import_weights
from jaxpar.training.console import evaluation_table
from jaxpar.training.fit import evaluate_run, fit
from jaxpar.training.run_folder import RunFolder

# An option of a command, which is off where it is not given; those of tasks and settings have a --no- too.
Switch = FlagCreatePairsOff[bool]

# Pictures of a task's step, and those that need no task.
PICTURES = ("schedule", "timeline", "bubble", "memory", "bytes")
PICTURES_OF_RUNS = ("curves", "strategies")

# What --mesh auto stands for until the cost model has chosen.
AUTO = MeshConfig(data=-1)


def read_mesh(text: str) -> MeshConfig:
    """The mesh of a text, or `AUTO`."""
    return AUTO if text == "auto" else MeshConfig.parse(text)


class Command(Protocol):
    """What a command line asks for."""

    def run(self) -> int:
        """The exit code."""
        ...


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every command that computes."""

    simulate: int | None = None
    """Use this many simulated devices on the CPU."""
    compile_cache: bool = True
    """Keep compiled programs in ~/.cache/jaxpar (JAX 0.11 or newer), or in JAX_COMPILATION_CACHE_DIR."""
    debug: Switch = False
    """Print the traceback of an error, not just its message."""


@dataclasses.dataclass(frozen=True)
class TaskOptions(Options):
    """Options of commands that are about a task."""

    config_file: Annotated[str | None, arg(name="config", metavar="FILE.toml")] = None
    """A file of settings; options given here override it."""
    task: Annotated[Task, arg(name="")] = dataclasses.field(kw_only=True)
    parallel: Annotated[Parallel, Fixed] = dataclasses.field(kw_only=True)
    train: Annotated[TrainConfig, Fixed] = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class RunOptions(TaskOptions):
    """Options of commands that are about a task on a mesh."""

    devices: tuple[int, ...] | None = None
    """Numbers of the devices to use; by default all of them."""
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
    """Trains a model and evaluates it: a language model, one of images, or yours.

    Ctrl-C stops it after the current step, with its state saved; --resume continues. --mesh auto lets the
    cost model choose mesh and pipeline. The exit code is 0 at the end, 2 after a mistake of yours, 3 if a
    loss or gradient was not finite (--train.nonfinite), and 128 and its number after a signal.
    """

    resume: Switch = False
    """Continue the run in --train.out-dir, or the latest one, with its task and settings."""
    resume_or_begin: Switch = False
    """Continue the run in --train.out-dir, or begin it there: one command for every start of a job."""
    overwrite: Switch = False
    """Remove the run that is in --train.out-dir."""
    elastic: Switch = False
    """If the mesh does not fit the available devices, take another one; so runs continue with those left."""
    balance: Literal["work", "time", "memory"] = "work"
    """What a balanced placement evens out: FLOPs, time as measured here, or memory."""
    memory: Annotated[str | None, arg(metavar="SIZE")] = None
    """Memory of a device, such as 16GB: a layout that needs more, by the compiler's number, is refused."""
    profile: Switch = False
    """Write a trace of steps 3 to 5 into the run's folder, for ui.perfetto.dev."""

    def run(self) -> int:
        """The exit code: 0, or 128 and the number of the signal that stopped it."""
        if self.resume_or_begin and self.overwrite:
            raise ValueError(
                "--resume-or-begin keeps what is in the folder, --overwrite removes it; use one of them"
            )
        task, parallel, train = self._settled()
        result = fit(
            task,
            parallel,
            train,
            resume=self.resume,
            overwrite=self.overwrite,
            profile=self.profile,
        )
        return 0 if result.stopped_by is None else 128 + result.stopped_by

    def _settled(self) -> Settings:
        """The settings with what the cost model chooses, or holds against the memory."""
        task, parallel, train = self.settings
        plans, num_bytes = self.parallel.mesh is AUTO, _num_bytes(self.memory)
        if not plans and not self.elastic and self.balance == "work" and num_bytes is None:
            return self.settings
        sized = task.resolve()
        takes_all = -1 in parallel.mesh.sizes.values()
        _check_room(
            sized, jax.device_count() if takes_all else parallel.mesh.num_devices, num_bytes
        )
        if self.elastic:
            parallel, reason = fit_devices(sized, parallel, train, keep=not plans)
            if reason and jax.process_index() == 0:
                print(f"mesh        {reason}")
            if self.balance == "work" and num_bytes is None:
                return Settings(task, parallel, train)
        elif plans:
            if self.devices is not None:
                raise ValueError(
                    "--mesh auto takes all devices, and --devices names some; leave out one of the two"
                )
            _say_what_takes_long()
            ranking = plan_here(sized, parallel, train, num_bytes)
            print(ranking, end="\n\n")
            parallel = ranking.best.parallel
        asked, parallel = parallel, Setup.of(sized, parallel, train).parallel
        if not plans and self.balance == "work":
            needed = compiled_cost(predict_step(sized, parallel, train)).memory_bytes
            if num_bytes is None or needed <= num_bytes:
                return Settings(task, asked, train)
        if not plans:
            _say_what_takes_long()
        machine = find_machine(HERE, num_bytes)
        if self.balance != "work":
            machine = measure_pieces(machine, [StepShape(sized, parallel, train)])
            placement = place(sized, parallel, train, machine, self.balance)
            pipeline = dataclasses.replace(parallel.pipeline, placement=placement)
            parallel = dataclasses.replace(parallel, pipeline=pipeline)
        check_fits(sized, parallel, train, machine)
        return Settings(task, parallel, train)


@dataclasses.dataclass(frozen=True)
class Plan(TaskOptions):
    """Prints which mesh and pipeline are the fastest for a task, by the cost model, and why.

    Every mesh is considered, and the three best are compiled; the devices need not be there.
    """

    devices: int | None = None
    """Number of devices; by default as many as JAX has."""
    machine: str = "here"
    """What the devices are: here (measured once), h100, h200, a100, tpu-v5e, laptop-cpu, or a file."""
    memory: Annotated[str | None, arg(metavar="SIZE")] = None
    """Memory of a device, such as 16GB, instead of the machine's own."""

    def run(self) -> int:
        """The exit code, 0."""
        task, num_bytes = self.task.resolve(), _num_bytes(self.memory)
        parallel = dataclasses.replace(self.parallel, mesh=MeshConfig())  # shares are kept
        require_positive(self, *["devices"] * (self.devices is not None))
        _check_room(task, self.devices or jax.device_count(), num_bytes)
        if self.machine == HERE:
            _say_what_takes_long()
        if self.machine == HERE and self.devices is None:
            ranking = plan_here(task, parallel, self.train, num_bytes)
        else:
            machine = find_machine(self.machine, num_bytes)
            ranking = plan(task, parallel, self.train, self.devices, machine)
        _print(ranking)
        print(
            "\nM: microbatches; K: chunks of time. More units (M x K) keep stages busier; each has a cost of "
            "its own."
        )
        chosen = Settings(self.task, ranking.best.parallel, self.train)
        print(f"To train with the first: {_train_command(chosen, self.simulate)}")
        return 0


@dataclasses.dataclass(frozen=True)
class TrainedOptions(Options):
    """Options of commands that are about a trained model."""

    run_dir: Annotated[str, Positional, arg(metavar="RUN_DIR")] = dataclasses.field(kw_only=True)
    """The folder of the run, such as runs/0001."""
    best: Switch = False
    """Use the state with the lowest validation loss, not the newest."""
    mesh: MeshConfig = ONE_DEVICE
    """Axes and sizes of the mesh, such as dp2tp2."""


@dataclasses.dataclass(frozen=True)
class Evaluate(TrainedOptions):
    """Prints how good a trained model is on the validation and test data of its run.

    On one device, or on any --mesh.
    """

    mesh: MeshConfig = ONE_DEVICE
    """Axes and sizes of the mesh, such as dp2pp2tp2 or data=2,stage=2,tensor=2."""
    batch_size: int | None = None
    """Rows of a batch, if not as in training: 1 reads a text as one stream."""
    seq_len: int | None = None
    """Time steps of a window, if not as in training."""
    adaptation: Adaptation = Adaptation()
    """Dynamic evaluation: after each window has been counted, a step of gradient descent on it."""

    def run(self) -> int:
        """The exit code, 0."""
        group = start_processes()
        if group is not None and self.mesh == ONE_DEVICE:
            raise ValueError(
                "evaluate runs in several processes, and without --mesh it takes one device; "
                "give a --mesh over all devices, or set JAXPAR_NUM_PROCESSES=1"
            )
        names = ("run_dir", "best", "mesh", "batch_size", "seq_len", "adaptation")
        asked_for = {name: getattr(self, name) for name in names}
        agree(asked_for, remedy="start all of them with the same options", last=True)
        sizes = {"batch_size": self.batch_size, "seq_len": self.seq_len}
        evaluations = evaluate_run(
            RunFolder(self.run_dir),
            self.mesh,
            best=self.best,
            adaptation=self.adaptation,
            **{name: size for name, size in sizes.items() if size is not None},
        )
        if jax.process_index() == 0:
            make_console().print(evaluation_table(evaluations))
        return 0


@dataclasses.dataclass(frozen=True)
class Sample(TrainedOptions):
    """Prints text by a trained language model."""

    prompt: str = ""
    """Words that the text begins with, all of them in the run's vocabulary."""
    length: int = 50
    """Tokens to add."""
    temperature: float = 0.8
    """Below 1 prefers likelier words; 0 always takes the likeliest."""
    seed: int = 0
    """The same seed gives the same text."""

    def run(self) -> int:
        """The exit code, 0."""
        text = sample(
            self.run_dir,
            self.prompt,
            length=self.length,
            temperature=self.temperature,
            seed=self.seed,
            mesh=self.mesh,
            best=self.best,
        )
        print(text)
        return 0


@dataclasses.dataclass(frozen=True)
class Inspect(RunOptions):
    """Prints what the compiled training step sends between devices, its FLOPs and its memory.

    Nothing is trained.
    """

    json: Switch = False
    """Print it as JSON, with all that is known of each collective."""
    compare: Switch = False
    """Print what the cost model predicts beside the compiled program and a few measured steps."""

    def run(self) -> int:
        """The exit code, 0."""
        task, parallel, train = self.settings
        if self.compare:
            print(compare_here(task, parallel, train))
            return 0
        report = inspect_step(task, parallel, train)
        if self.json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            make_console().print(report, highlight=False)
        return 0


@dataclasses.dataclass(frozen=True)
class Plot(RunOptions):
    """Draws a picture of a task's step, into a file or the terminal.

    Kinds: "schedule", what each stage does when, by --mesh and --pipeline; "timeline", what each stage did
    when in a real step, beside its schedule; "bubble", against microbatches and chunks of time;
    "memory" of a device, by kind, and "bytes" that a device sends, by axis, for each of --meshes.
    """

    kind: Annotated[str, Fixed] = dataclasses.field(kw_only=True)
    output: Annotated[str | None, arg(aliases=("-o",), metavar="FILE")] = None
    """A .png, .svg or .html; without one a schedule or timeline is shown here."""
    meshes: Annotated[tuple[str, ...], arg(metavar="SHAPES")] = ()
    """Meshes to compare, such as dp8 tp8 pp8; without them, --mesh."""

    def run(self) -> int:
        """The exit code, 0."""
        meshes = {shape: MeshConfig.parse(shape) for shape in self.meshes}
        _show(plot(self.kind, self.settings, meshes, (), self.output))
        return 0


@dataclasses.dataclass(frozen=True)
class PlotRuns(Options):
    """Draws a picture into a file: of runs, or of the four ways to share a step.

    Kinds: "curves", loss and speed of runs (plot curves runs/0001 runs/0002); "strategies", the four ways as
    an animation.
    """

    kind: Annotated[str, Fixed] = dataclasses.field(kw_only=True)
    runs: Annotated[tuple[str, ...], Positional, arg(metavar="[RUN_DIR ...]")] = ()
    """Folders of runs, for curves."""
    output: Annotated[str | None, arg(aliases=("-o",), metavar="FILE")] = None
    """A .png, .svg or .html; of strategies an .html."""

    def run(self) -> int:
        """The exit code, 0."""
        _show(plot(self.kind, None, {}, self.runs, self.output))
        return 0


@dataclasses.dataclass(frozen=True)
class Export(TrainedOptions):
    """Writes the weights of a language model of LSTM or GRU layers as safetensors, as PyTorch has them."""

    output: Annotated[str, arg(aliases=["-o"], metavar="FILE")] = dataclasses.field(kw_only=True)
    """The file, such as model.safetensors."""
    num_biases: int = 2
    """Of each layer: 2 as in torch.nn.GRU and LSTM; an LSTM's second is all zero, and 1 leaves it out."""

    def run(self) -> int:
        """The exit code, 0."""
        task = export_weights(
            self.run_dir, self.output, num_biases=self.num_biases, mesh=self.mesh, best=self.best
        )
        print(f"wrote {self.output}: {_describe(task)}")
        return 0


# A file of weights tells the sizes of its model; the rest of the task is options.
_SIZES = ("num_layers", "hidden_size", "embed_size", "vocab_size", "num_words", "tie_embedding")
TextOptions = dataclasses.make_dataclass(
    "TextOptions",
    [
        (field.name, get_type_hints(LM)[field.name], dataclasses.field(default=field.default))
        for field in dataclasses.fields(LM)
        if field.name not in _SIZES
    ],
    namespace={"__doc__": LM.__doc__, "__module__": __name__},
    frozen=True,
)


@dataclasses.dataclass(frozen=True)
class Import(Options):
    """Begins a run of the task lm with the weights of a safetensors file, as export or PyTorch writes it.

    evaluate, sample and train --resume then take that run.
    """

    run_dir: Annotated[str, Positional, arg(metavar="RUN_DIR")] = dataclasses.field(kw_only=True)
    """The folder of the new run."""
    input: Annotated[str, arg(aliases=["-i"], metavar="FILE")] = dataclasses.field(kw_only=True)
    """The file, which has the sizes of the model."""
    vocabulary: Annotated[str | None, arg(metavar="FILE")] = None
    """The model's words, one per line, or a run's vocabulary.json, if the file does not have them."""
    names: tuple[str, str, str] = NAMES
    """What the file calls the embedding, the LSTM or GRU ("auto": lstm or gru), and the head."""
    overwrite: Switch = False
    """Remove the run that is in the folder."""
    mesh: MeshConfig = ONE_DEVICE
    """Axes and sizes of the mesh, such as dp2tp2."""
    text: Annotated[TextOptions, arg(name="")] = dataclasses.field(  # pyright: ignore[reportInvalidTypeForm]
        default_factory=TextOptions
    )
    train: TrainConfig = LM.train

    def run(self) -> int:
        """The exit code, 0."""
        task = import_weights(
            self.input,
            self.run_dir,
            LM(**vars(self.text)),
            dataclasses.replace(LM.parallel, mesh=self.mesh),
            self.train,
            vocabulary=self.vocabulary,
            names=self.names,
            overwrite=self.overwrite,
        )
        print(
            f"wrote {self.run_dir}: {_describe(task)}; use it with evaluate, sample, or "
            f"train --resume --train.out-dir {self.run_dir}"
        )
        return 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """Runs train or evaluate in several processes here, or prints a script for a cluster.

    Such as: launch --processes 2 --devices-per-process 4 -- train lm --mesh dp2pp2tp2
    """

    command: Positional[tuple[str, ...]]
    """After --: the command, such as train lm, and its arguments."""
    processes: int = 2
    """Number of processes."""
    devices_per_process: int = 1
    """Devices of each: simulated ones here; on a cluster GPUs, or what --platform says."""
    template: Annotated[Literal["slurm", "jobset"] | None, arg(name="print")] = None
    """Start nothing; print a script for sbatch, or a Kubernetes JobSet."""
    platform: Literal["gpu", "cpu"] = "gpu"
    """What devices the nodes of the script have."""
    elastic: Switch = False
    """When processes die, continue with the others from the last checkpoint; with more at the next start."""
    min_processes: int = 1
    """With fewer than this an elastic run waits for its next start."""
    debug: Switch = False
    """Print the traceback of an error, not just its message."""

    def run(self) -> int:
        """The exit code: 0, or that of the first process that failed."""
        what = (self.command, self.processes, self.devices_per_process)
        if self.template is None:
            return launch(*what, elastic=self.elastic, min_processes=self.min_processes)
        if self.elastic:
            command = elastic_command(self.command, self.processes, self.min_processes)
            what = (command, *what[1:])
        if self.template == "jobset":  # which has as many pods at every start
            print(jobset_manifest(*what, self.platform), end="")
            return 0
        min_processes = self.min_processes if self.elastic else None
        print(slurm_script(*what, self.platform, min_processes), end="")
        return 0


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Looks at versions, devices, memory and the network, and says what is wrong with them."""

    debug: Switch = False
    """Print the traceback of an error, not just its message."""

    def run(self) -> int:
        """The exit code: 1 if there is an error, else 0."""
        return doctor.main()


# By their names.
COMMANDS: Mapping[str, type[Command]] = {
    "train": Train,
    "plan": Plan,
    "evaluate": Evaluate,
    "sample": Sample,
    "inspect": Inspect,
    "plot": Plot,
    "export": Export,
    "import": Import,
    "launch": Launch,
    "doctor": Doctor,
}


def _check_room(task: Task, num_devices: int, num_bytes: float | None) -> None:
    """Raises if no layout at all can fit, before a machine is measured to find the best one."""
    if num_bytes is None:
        return
    leaves = jax.tree.leaves(ModelFacts.of(task).params)
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / num_devices
    if needed > num_bytes:
        raise ValueError(
            f"--memory: a device has {format_bytes(num_bytes)}, and the parameters alone need "
            f"{format_bytes(needed)} on each of {format_count(num_devices, 'device')}; use more devices, or "
            f"a smaller model"
        )


def _say_what_takes_long() -> None:
    if jax.process_index() == 0:
        print(
            "measuring this machine where it was not measured before (a minute the first time) ...",
            file=sys.stderr,
            flush=True,
        )


def _train_command(settings: Settings, simulate: int | None) -> str:
    """The command line that trains so. What data tell, such as the size of a vocabulary, is left to them."""
    task, parallel, train = settings
    words = ["python", "-m", "jaxpar", "train", spec_of(task)]
    words += ["--simulate", str(simulate)] * (simulate is not None)
    words += [*_options(task, type(task)()), "--mesh", short_name(parallel.mesh)]
    words += _options(dataclasses.replace(parallel, mesh=task.parallel.mesh), task.parallel)
    return shlex.join([*words, *_options(train, task.train, "train.")])


def _options(config: Any, default: Any, prefix: str = "") -> list[str]:
    """The options that make a config of its default."""
    words: list[str] = []
    for field in dataclasses.fields(config):
        name, value, before = field.name, getattr(config, field.name), getattr(default, field.name)
        option = f"{prefix}{name.replace('_', '-')}"
        if value == before or field.default is None:
            continue
        if dataclasses.is_dataclass(value):
            words += _options(value, before, f"{option}.")
        elif isinstance(value, bool):
            words.append(f"--{option}" if value else f"--{prefix}no-{name.replace('_', '-')}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{option}", *map(str, values)]
    return words


def _num_bytes(size: str | None) -> float | None:
    """Of a size such as 16GB."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMGT]?)B?", size)
    if match is None:
        raise ValueError(f"--memory {size}: write a number and its unit, such as 16GB")
    return float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]


def _print(ranking: Shown) -> None:
    """Its picture as wide as the terminal, in letters that it has."""
    console = make_console()
    with console.capture() as capture:
        console.print(ranking, highlight=False)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _show(picture: Path | Drawing) -> None:
    """Where a picture is, or the picture."""
    if isinstance(picture, Path):
        print(f"wrote {picture}")
    else:
        make_console().print(picture, highlight=False)


def _describe(task: LM) -> str:
    return (
        f"{task.num_layers} layers of {task.hidden_size}, embedding of {task.embed_size}, "
        f"vocabulary of {task.num_words}"
    )
