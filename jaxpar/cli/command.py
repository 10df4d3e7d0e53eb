"""What a command of the command line is, and the options that many of them have; see `cli`."""

import dataclasses
from typing import Annotated, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, arg

from jaxpar.mesh import ONE_DEVICE, MeshConfig

# An option of a command, which is off where it is not given; those of tasks and settings have a --no- too.
Switch = FlagCreatePairsOff[bool]

_OF_EACH_PROCESS = {"simulate", "compile_cache", "debug"}


class Command(Protocol):
    """What a command line asks for: a dataclass, whose fields are options and whose docstring is the help."""

    def run(self) -> int:
        """The exit code."""
        ...


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every command that computes.

    Attributes:
      simulate: use this many simulated devices on the CPU.
      compile_cache: keep compiled programs in ~/.cache/jaxpar (JAX 0.11 or newer), or in
        JAX_COMPILATION_CACHE_DIR.
      debug: print the traceback of an error, not just its message.
    """

    simulate: int | None = None
    compile_cache: bool = True
    debug: Switch = False


@dataclasses.dataclass(frozen=True)
class TrainedOptions(Options):
    """Options of commands that are about a trained model.

    Attributes:
      run_dir: the folder of the run, such as runs/0001.
      best: use the state with the lowest validation loss, not the newest.
      mesh: axes and sizes of the mesh, such as dp2tp2.
    """

    run_dir: Annotated[str, Positional, arg(metavar="RUN_DIR")] = dataclasses.field(kw_only=True)
    best: Switch = False
    mesh: MeshConfig = ONE_DEVICE

    def start_processes(self) -> None:
        """Joins the processes of a group, which then have the same options; nothing, in one that runs alone.

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
                f"Fix: give one over all devices, or set JAXPAR_NUM_PROCESSES=1."
            )
        names = {field.name for field in dataclasses.fields(self)} - _OF_EACH_PROCESS
        asked_for = {name: getattr(self, name) for name in sorted(names)}
        agree(asked_for, remedy="start all of them with the same options", last=True)
