"""The protocol of a command, and the options that many commands have; see `cli`."""

import dataclasses
from typing import Annotated, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, arg

from jaxpar.mesh import ONE_DEVICE, MeshConfig

# An option that is off unless it is given. Those of tasks and settings also have a --no- form.
Switch = FlagCreatePairsOff[bool]

_OF_EACH_PROCESS = {"simulate", "compile_cache", "debug"}


class Command(Protocol):
    """A command: a dataclass, whose fields are options and whose docstring is the help text."""

    def run(self) -> int:
        """The exit code."""
        ...


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every command that computes.

    Attributes:
      simulate: Number of simulated devices, on the CPU.
      compile_cache: Keep compiled programs for later runs, in ~/.cache/jaxpar (JAX 0.11 or newer) or the
        folder that JAX_COMPILATION_CACHE_DIR names.
      debug: Print the traceback of an error, not only its message.
    """

    simulate: int | None = None
    compile_cache: bool = True
    debug: Switch = False


@dataclasses.dataclass(frozen=True)
class TrainedOptions(Options):
    """Options of commands that use a trained model.

    Attributes:
      run_dir: Run folder, such as runs/0001.
      best: Use the state with the lowest validation loss, not the newest.
      mesh: Device mesh, such as dp2tp2. By default one device.
    """

    run_dir: Annotated[str, Positional, arg(metavar="RUN_DIR")] = dataclasses.field(kw_only=True)
    best: Switch = False
    mesh: MeshConfig = ONE_DEVICE

    def start_processes(self) -> None:
        """Joins the processes of a group and checks that their options agree; a single process does nothing.

        Raises:
          ValueError: the mesh is of one device, or options differ; or as of `hosts.start_processes`.
        """
        from jaxpar.hosts.agree import agree
        from jaxpar.hosts.distributed import start_processes

        if start_processes() is None:
            return
        if self.mesh == ONE_DEVICE:
            raise ValueError(
                f"{type(self).__name__.lower()} in several processes needs --mesh\n"
                f"Fix: give a mesh over all devices, or set JAXPAR_NUM_PROCESSES=1."
            )
        names = {field.name for field in dataclasses.fields(self)} - _OF_EACH_PROCESS
        asked_for = {name: getattr(self, name) for name in sorted(names)}
        agree(asked_for, remedy="start all of them with the same options", last=True)
