"""The commands of a language model. What they run is imported when they run."""

import dataclasses

from jaxpar.command import Command, TrainedOptions


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


# By their names.
COMMANDS: dict[str, type[Command]] = {"sample": Sample}
