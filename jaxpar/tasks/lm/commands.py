"""The commands of a language model. What they run is imported when they run."""

import dataclasses
from typing import Annotated, get_type_hints

from tyro.conf import Positional, arg

from jaxpar.command import Command, Options, Switch, TrainedOptions
from jaxpar.config import TrainConfig
from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.tasks.lm.task import LM, NAMES


@dataclasses.dataclass(frozen=True)
class Sample(TrainedOptions):
    """Prints text by a trained language model.

    Attributes:
      prompt: words that the text begins with, all of them in the run's vocabulary.
      length: tokens to add.
      temperature: below 1 prefers likelier words; 0 always takes the likeliest.
      seed: the same seed gives the same text.
    """

    prompt: str = ""
    length: int = 50
    temperature: float = 0.8
    seed: int = 0

    def run(self) -> int:
        """The exit code, 0."""
        from jaxpar.tasks.lm.loaded import sample

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
class Export(TrainedOptions):
    """Writes the weights of a language model of LSTM or GRU layers as safetensors, as PyTorch has them.

    Attributes:
      output: the file, such as model.safetensors.
      num_biases: of each layer: 2 as in torch.nn.GRU and LSTM; an LSTM's second is all zero, and 1 leaves
        it out.
    """

    output: Annotated[str, arg(aliases=["-o"], metavar="FILE")] = dataclasses.field(kw_only=True)
    num_biases: int = 2

    def run(self) -> int:
        """The exit code, 0."""
        from jaxpar.tasks.lm.weights import export_weights

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

    Attributes:
      run_dir: the folder of the new run.
      input: the file, which has the sizes of the model.
      vocabulary: the model's words, one per line, or a run's vocabulary.json, if the file does not have
        them.
      names: what the file calls the embedding, the LSTM or GRU ("auto": lstm or gru), and the head.
      overwrite: remove the run that is in the folder.
      mesh: axes and sizes of the mesh, such as dp2tp2.
    """

    run_dir: Annotated[str, Positional, arg(metavar="RUN_DIR")] = dataclasses.field(kw_only=True)
    input: Annotated[str, arg(aliases=["-i"], metavar="FILE")] = dataclasses.field(kw_only=True)
    vocabulary: Annotated[str | None, arg(metavar="FILE")] = None
    names: tuple[str, str, str] = NAMES
    overwrite: Switch = False
    mesh: MeshConfig = ONE_DEVICE
    text: Annotated[TextOptions, arg(name="")] = dataclasses.field(  # pyright: ignore[reportInvalidTypeForm]
        default_factory=TextOptions
    )
    train: TrainConfig = LM.train

    def run(self) -> int:
        """The exit code, 0."""
        from jaxpar.tasks.lm.weights import import_weights

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


# By their names.
COMMANDS: dict[str, type[Command]] = {"sample": Sample, "export": Export, "import": Import}


def _describe(task: LM) -> str:
    return (
        f"{task.num_layers} layers of {task.hidden_size}, embedding of {task.embed_size}, "
        f"vocabulary of {task.num_words}"
    )
