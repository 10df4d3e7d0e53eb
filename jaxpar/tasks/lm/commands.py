"""The commands of a language model. What they run is imported when they run."""

import dataclasses
from pathlib import Path

from jaxpar.base.checks import require
from jaxpar.base.files import read_text
from jaxpar.cli.command import Command, TrainedOptions


@dataclasses.dataclass(frozen=True)
class Sample(TrainedOptions):
    """Prints text by a trained language model, on one device or on any --mesh.

    Attributes:
      prompt: words that the text begins with, all of them in the run's vocabulary.
      prompts: a file with a prompt in each line, instead of one; as many texts are printed.
      length: tokens to add.
      temperature: below 1 prefers likelier words; 0 always takes the likeliest.
      top_k: draw among so many of the likeliest words; 0 draws among all.
      top_p: draw among the likeliest words that have this probability together.
      end: a token at which a text ends, such as "<eos>".
      seed: the same seed gives the same text.
    """

    prompt: str = ""
    prompts: str | None = None
    length: int = 50
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    end: str | None = None
    seed: int = 0

    def run(self) -> int:
        """The exit code, 0."""
        from jaxpar.tasks.lm.loaded import sample

        prompts = [self.prompt]
        if self.prompts is not None:
            fact = "--prompt and --prompts exclude each other"
            require(not self.prompt, f"{fact}\nFix: leave one of them out.")
            prompts = read_text(Path(self.prompts).expanduser()).splitlines()
            require(bool(prompts), f"{self.prompts} has no prompts\nFix: write one in each line.")
        names = ("length", "temperature", "top_k", "top_p", "end", "seed", "mesh", "best")
        options = {name: getattr(self, name) for name in names}
        for text in sample(self.run_dir, prompts, **options):
            print(text)
        return 0


# By their names.
COMMANDS: dict[str, type[Command]] = {"sample": Sample}
