"""A run of a language model by its folder."""

from os import PathLike
from pathlib import Path

from jaxpar.task import spec_of
from jaxpar.tasks.lm.corpus import Vocabulary
from jaxpar.tasks.lm.task import LM, VOCABULARY
from jaxpar.training.run_folder import RunFolder


def open_run(run_dir: str | PathLike[str]) -> tuple[RunFolder, Vocabulary]:
    """The folder of a run, and the vocabulary that it keeps.

    Raises:
      ValueError: the run is of another task, or its vocabulary is damaged.
      OSError: no run has written here, or the vocabulary cannot be read.
    """
    folder = RunFolder(Path(run_dir))
    task = folder.settings().task
    if not isinstance(task, LM):
        raise ValueError(
            f"the run in {folder} is of the task {spec_of(task)}; give one of the task lm, or look "
            f"at this one in Python: jaxpar.load_run({str(folder)!r}).params"
        )
    return folder, read_vocabulary(folder)


def read_vocabulary(folder: RunFolder) -> Vocabulary:
    """The vocabulary that a run keeps.

    Raises:
      ValueError, OSError: it is damaged, or cannot be read.
    """
    folder.read(VOCABULARY)  # is it as it was written?
    return Vocabulary.load(folder.path / VOCABULARY)
