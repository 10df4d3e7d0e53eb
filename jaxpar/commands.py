"""The commands of `python -m jaxpar`: what each takes, and what it runs."""

import dataclasses
import json
import re
from typing import Annotated, Literal

import jax
from tyro.conf import Positional, arg

from jaxpar.analysis import inspect_step
from jaxpar.config import CONFIGS, Config, DataConfig, RunConfig, TrainConfig
from jaxpar.display import make_console
from jaxpar.hosts import doctor
from jaxpar.hosts.distributed import start_processes
from jaxpar.hosts.launch import TEMPLATES, launch
from jaxpar.mesh import MeshConfig
from jaxpar.pictures.plot import plot
from jaxpar.planning import (
    HERE,
    check_fits,
    compare_here,
    find_machine,
    measure_pieces,
    pieces_of,
    place,
    plan,
    plan_here,
)
from jaxpar.training.console import ConsoleReport, evaluation_table
from jaxpar.training.fit import evaluate_run, fit
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.sample import sample
from jaxpar.training.tasks import complete, read_vocab
from jaxpar.training.weights import export_weights, import_weights

AUTO = "auto"  # a --mesh that the planner chooses


@dataclasses.dataclass(frozen=True)
class Options:
    """What every command takes."""

    mesh: Annotated[str | None, arg(metavar="SHAPE")] = None
    """Axes and sizes of the mesh, such as dp2pp2tp2 or data=2,stage=2,tensor=2; train takes auto as well."""
    simulate: int | None = None
    """Use this many simulated devices on the CPU."""
    compile_cache: bool = True
    """Keep compiled programs in ~/.cache/jaxpar (JAX 0.11 or newer), or in JAX_COMPILATION_CACHE_DIR."""
    debug: bool = False
    """Print the traceback of an error, not its message alone."""


@dataclasses.dataclass(frozen=True)
class ConfigOptions(Options):
    """What a command takes that is about a config."""

    config_file: Annotated[str | None, arg(name="config", metavar="FILE.toml")] = None
    """A file of settings; those given here go before it."""
    model: Annotated[Literal["lstm", "hybrid"] | None, arg(metavar="{lstm,hybrid}")] = None
    """The model whose settings these are; see --help with each. Without one, lstm."""
    config: Annotated[RunConfig, arg(name="")] = dataclasses.field(
        default_factory=lambda: CONFIGS["lstm"]
    )


@dataclasses.dataclass(frozen=True)
class Train(ConfigOptions):
    """Trains a model and evaluates it: a language model, or --model hybrid on images.

    Ctrl-C stops it after the step under way, with its state saved; --resume goes on. The exit code is 0
    at the end, 2 after a mistake of yours, 3 if a loss or gradient was not finite (--train.nonfinite),
    and 128 and its number after a signal.
    """

    resume: bool = False
    """Go on with the run in --train.out-dir, or with the latest, with its settings."""
    overwrite: bool = False
    """Remove the run that is in --train.out-dir."""
    balance: Literal["work", "time", "memory"] = "work"
    """What a balanced placement evens out: FLOPs, time as measured here, or memory."""
    memory: Annotated[str | None, arg(metavar="SIZE")] = None
    """What a device has, such as 16GB: a config that needs more is refused before it is compiled."""
    profile: bool = False
    """Write a trace of steps 3 to 5 into the run's folder, for ui.perfetto.dev."""

    def run(self) -> int:
        """The exit code: 0, or 128 and the number of the signal that stopped it."""
        start_processes()
        result = fit(
            self._settled() if self._asks_the_model else self.config,
            resume=self.resume,
            overwrite=self.overwrite,
            profile=self.profile,
            report=ConsoleReport(),
        )
        return 0 if result.stopped_by is None else 128 + result.stopped_by

    @property
    def _asks_the_model(self) -> bool:
        return self.mesh == AUTO or self.balance != "work" or self.memory is not None

    def _settled(self) -> RunConfig:
        """The config with what the cost model chooses, or holds against the memory."""
        config, num_bytes = _of_text(self.config), _num_bytes(self.memory)
        if self.mesh == AUTO:
            ranking = plan_here(config, num_bytes)
            print(ranking, end="\n\n")
            config = ranking.best.config
        config = dataclasses.replace(config, mesh=config.mesh.resolve())
        machine = find_machine(HERE, num_bytes)
        if self.balance != "work":
            machine = measure_pieces(machine, pieces_of(config).values())
            placement = place(config, machine, self.balance)
            pipeline = dataclasses.replace(config.pipeline, placement=placement)
            config = dataclasses.replace(config, pipeline=pipeline)
        check_fits(config, machine)
        return config


@dataclasses.dataclass(frozen=True)
class Plan(ConfigOptions):
    """Prints which mesh and pipeline are the quickest for a model, by the cost model, and why.

    Nothing is compiled; the devices need not be there.
    """

    devices: int | None = None
    """How many there are; by default those that JAX has."""
    machine: str = "here"
    """What they are: here (measured once, in a minute), h100, h200, a100, tpu-v5e, laptop-cpu, or a file."""
    memory: Annotated[str | None, arg(metavar="SIZE")] = None
    """What a device has, such as 16GB, instead of what the machine says."""

    def run(self) -> int:
        """The exit code, 0."""
        config, num_bytes = _of_text(self.config), _num_bytes(self.memory)
        if self.machine == HERE and self.devices is None:
            print(plan_here(config, num_bytes))
        else:
            machine = find_machine(self.machine, num_bytes)
            print(plan(config, self.devices or jax.device_count(), machine))
        return 0


@dataclasses.dataclass(frozen=True)
class Evaluate(Options):
    """Prints how good a trained model is on the validation and test data of its run.

    On one device, or on any --mesh.
    """

    run_dir: Positional[str] = dataclasses.field(kw_only=True)
    """The folder of the run, such as runs/0001."""
    best: bool = False
    """Of the state with the lowest validation loss, not the newest."""

    def run(self) -> int:
        """The exit code, 0."""
        group = start_processes()
        if group is not None and self.mesh is None:
            raise ValueError(
                "evaluate runs in several processes, and without --mesh it takes one device; "
                "give a --mesh over all devices, or set JAXPAR_NUM_PROCESSES=1"
            )
        evaluations = evaluate_run(RunFolder(self.run_dir), _mesh(self.mesh), best=self.best)
        if jax.process_index() == 0:
            make_console().print(evaluation_table(evaluations))
        return 0


@dataclasses.dataclass(frozen=True)
class Sample(Options):
    """Prints a text by a trained model."""

    run_dir: Positional[str] = dataclasses.field(kw_only=True)
    """The folder of the run, such as runs/0001."""
    best: bool = False
    """Of the state with the lowest validation loss, not the newest."""
    prompt: str = ""
    """Words that the text begins with; all in the vocabulary of the run."""
    length: int = 50
    """Tokens to add."""
    temperature: float = 0.8
    """Below 1 likelier words are preferred; 0 takes the likeliest every time."""
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
            mesh=_mesh(self.mesh),
            best=self.best,
        )
        print(text)
        return 0


@dataclasses.dataclass(frozen=True)
class Inspect(ConfigOptions):
    """Prints what the compiled training step sends between devices, its FLOPs and its memory.

    Nothing is trained. With --model.vocab-size no text is read either.
    """

    json: bool = False
    """Print it as JSON, with all that is known of each collective."""
    compare: bool = False
    """Print what the cost model predicts, beside what was compiled, and a few steps measured."""

    def run(self) -> int:
        """The exit code, 0."""
        mesh = self.config.mesh.build()
        config = complete(self.config, mesh)
        if self.compare:
            print(compare_here(_of_text(config), mesh))
            return 0
        report = inspect_step(config, mesh)
        if self.json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            make_console().print(report, highlight=False)
        return 0


@dataclasses.dataclass(frozen=True)
class Plot(ConfigOptions):
    """Draws a picture into a file: of a config, of runs, or of the four ways to share a step.

    Kinds: "schedule", what each stage does when, by --mesh and --pipeline; "timeline", what each stage of a
    step that is run did when, beside its schedule; "bubble", against microbatches and chunks of time;
    "memory" on a device, by kind, and "bytes" that a device sends, by axis, for each of --meshes; "curves",
    loss and speed of runs (plot curves runs/0001 runs/0002); "strategies", the four ways as an animation.
    """

    kind: Positional[
        Literal["schedule", "timeline", "bubble", "memory", "bytes", "curves", "strategies"]
    ] = dataclasses.field(kw_only=True)
    runs: Positional[tuple[str, ...]] = ()
    """Folders of runs, for curves."""
    output: Annotated[str | None, arg(aliases=("-o",), metavar="FILE")] = None
    """A .png, .svg or .html; without one, in this folder, KIND and what suits it."""
    meshes: Annotated[tuple[str, ...], arg(metavar="SHAPES")] = ()
    """Meshes to compare, such as dp8 tp8 pp8; without them, --mesh."""

    def run(self) -> int:
        """The exit code, 0."""
        configs = {
            mesh: dataclasses.replace(self.config, mesh=MeshConfig.parse(mesh))
            for mesh in self.meshes
        }
        print(plot(self.kind, self.config, configs, self.runs, self.output))
        return 0


@dataclasses.dataclass(frozen=True)
class Export(Options):
    """Writes the weights of a run as safetensors, in the names and the layout of PyTorch."""

    run_dir: Positional[str] = dataclasses.field(kw_only=True)
    """The folder of the run, such as runs/0001."""
    best: bool = False
    """Of the state with the lowest validation loss, not the newest."""
    output: Annotated[str, arg(aliases=["-o"], metavar="FILE")] = dataclasses.field(kw_only=True)
    """The file, such as model.safetensors."""
    num_biases: int = 2
    """Of each LSTM layer: 2 as in torch.nn.LSTM, the second all zero, or 1."""

    def run(self) -> int:
        """The exit code, 0."""
        mesh = _mesh(self.mesh)
        config = export_weights(
            self.run_dir, self.output, num_biases=self.num_biases, mesh=mesh, best=self.best
        )
        print(f"wrote {self.output}: {_describe(config)}")
        return 0


@dataclasses.dataclass(frozen=True)
class Import(Options):
    """Begins a run with the weights of a safetensors file, as export or PyTorch writes it.

    evaluate, sample and train --resume take the run from there.
    """

    run_dir: Positional[str] = dataclasses.field(kw_only=True)
    """The folder of the new run."""
    input: Annotated[str, arg(aliases=["-i"], metavar="FILE")] = dataclasses.field(kw_only=True)
    """The file; it tells the sizes of the model."""
    vocabulary: Annotated[str | None, arg(metavar="FILE")] = None
    """The model's words, one a line or a run's vocabulary.json, if the file does not tell them."""
    names: tuple[str, str, str] = ("embedding", "lstm", "head")
    """What the file calls the embedding, the LSTM and the linear layer after it."""
    overwrite: bool = False
    """Remove the run that is in the folder."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def run(self) -> int:
        """The exit code, 0."""
        config = import_weights(
            self.input,
            self.run_dir,
            Config(mesh=_mesh(self.mesh), data=self.data, train=self.train),
            vocabulary=self.vocabulary,
            names=self.names,
            overwrite=self.overwrite,
        )
        print(
            f"wrote {self.run_dir}: {_describe(config)}; use it with evaluate, sample, or "
            f"train --resume --train.out-dir {self.run_dir}"
        )
        return 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """Runs train or evaluate in several processes here, or prints a script for a cluster.

    Such as: launch --processes 2 --devices-per-process 4 -- train --mesh dp2pp2tp2
    """

    command: Positional[tuple[str, ...]]
    """After --: the command, such as train, and its arguments."""
    processes: int = 2
    """Number of processes."""
    devices_per_process: int = 1
    """Devices of each: simulated ones here, GPUs on a cluster."""
    template: Annotated[Literal["slurm", "jobset"] | None, arg(name="print")] = None
    """Start nothing; print a script for sbatch, or a Kubernetes JobSet."""
    debug: bool = False
    """Print the traceback of an error, not its message alone."""

    def run(self) -> int:
        """The exit code: 0, or that of the first process that failed."""
        what = (self.command, self.processes, self.devices_per_process)
        if self.template is None:
            return launch(*what)
        print(TEMPLATES[self.template](*what), end="")
        return 0


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Looks at versions, devices, memory and the network, and says what is wrong with them."""

    debug: bool = False
    """Print the traceback of an error, not its message alone."""

    def run(self) -> int:
        """The exit code: 1 if there is an error, else 0."""
        return doctor.main()


Command = Train | Plan | Evaluate | Sample | Inspect | Plot | Export | Import | Launch | Doctor


def _of_text(config: RunConfig) -> Config:
    """A config that has a cost model, with the size of its vocabulary."""
    if not isinstance(config, Config):
        raise ValueError(f"model {config.model.name!r} has no cost model; use lstm")
    return read_vocab(config)


def _num_bytes(size: str | None) -> float | None:
    """Of a size such as 16GB."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMGT]?)B?", size)
    if match is None:
        raise ValueError(f"--memory {size}: write it as 16GB")
    return float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2]]


def _mesh(shape: str | None) -> MeshConfig:
    """The mesh that is asked for, or one device."""
    return MeshConfig(devices=(0,)) if shape is None else MeshConfig.parse(shape)


def _describe(config: Config) -> str:
    model = config.model
    return (
        f"{model.num_layers} layers of {model.hidden_size}, embedding of {model.embed_size}, "
        f"vocabulary of {model.vocab_size}"
    )
