"""The commands of the language model task."""

import dataclasses
import sys

from jaxpar.base.checks import require
from jaxpar.base.files import read_text
from jaxpar.base.paths import local_path
from jaxpar.cli.command import Command, TrainedOptions


@dataclasses.dataclass(frozen=True)
class Sample(TrainedOptions):
    """Generate text with a trained language model, on one device or on the devices of --mesh.

    Ctrl-C stops it; the text so far is printed.

    Attributes:
      prompt: Start of the text. All its words must be in the vocabulary of the run.
      prompts: File with one prompt per line, in place of --prompt. Prints one text for each.
      length: Tokens to generate.
      temperature: Sampling temperature. Lower is less random; 0 is greedy.
      top_k: Sample only from this many of the most likely tokens. 0 samples from all.
      top_p: Sample only from the most likely tokens that together reach this probability (nucleus sampling).
      end: Token that ends a text, such as <eos>.
      seed: Random seed. The same seed gives the same text.
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
        """The exit code: 0, or 128 and the number of the signal that stopped it."""
        from jaxpar.lm.loaded import sample
        from jaxpar.lm.sampling import StoppedSample

        prompts = [self.prompt]
        if self.prompts is not None:
            fact = "--prompt and --prompts exclude each other"
            require(not self.prompt, f"{fact}\nFix: leave one of them out.")
            prompts = read_text(local_path(self.prompts)).splitlines()
            require(bool(prompts), f"{self.prompts} has no prompts\nFix: write one in each line.")
        names = ("length", "temperature", "top_k", "top_p", "end", "seed", "mesh", "best")
        options = {name: getattr(self, name) for name in names}
        try:
            texts = sample(self.run_dir, prompts, **options)
        except StoppedSample as stopped:
            for text in stopped.texts:
                print(text)
            print(stopped, file=sys.stderr)
            return 128 + stopped.signal
        for text in texts:
            print(text)
        return 0


# By their names.
COMMANDS: dict[str, type[Command]] = {"sample": Sample}
