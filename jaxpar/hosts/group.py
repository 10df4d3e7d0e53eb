"""The group of processes that this one belongs to, found from its environment variables.

The same command runs under every launcher; the environment says which one it was:

    by hand     JAX_COORDINATOR_ADDRESS=host:port JAXPAR_NUM_PROCESSES=2 JAXPAR_PROCESS_ID=0
    Slurm       srun --ntasks=2 python -m jaxpar train lm ...
    Open MPI    mpirun -n 2 python -m jaxpar train lm ...
    Kubernetes  the pods of an indexed Job or JobSet

`JAXPAR_NUM_PROCESSES=1` makes any of them a process that runs alone.
"""

import dataclasses
from collections.abc import Mapping

COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"  # JAX reads this one too
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # of process 0, if not where the others look for it
NUM_PROCESSES, PROCESS_ID = "JAXPAR_NUM_PROCESSES", "JAXPAR_PROCESS_ID"
SECRET = "JAXPAR_SECRET"  # the same in all; optional
ALONE = f"{NUM_PROCESSES}=1 to run alone"


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that run one program, as far as the environment of one of them tells.

    Attributes:
      launcher: who started them: "hand", "Slurm", "Open MPI" or "Kubernetes".
      num_processes: None if JAX is to ask the launcher.
      process_id: of this process; None likewise.
      coordinator_address: host:port of process 0; None likewise.
    """

    launcher: str
    num_processes: int | None = None
    process_id: int | None = None
    coordinator_address: str | None = None


def find_processes(environ: Mapping[str, str]) -> ProcessGroup | None:
    """The group that this process belongs to; None if it runs alone.

    A shell inside a Slurm allocation runs alone: only `srun` starts the others.

    Args:
      environ: such as `os.environ`.
    Raises:
      ValueError: settings are incomplete, or not numbers in range.
    """
    address = environ.get(COORDINATOR_ADDRESS)
    if address is not None and not address.rpartition(":")[2].isdecimal():
        fact = f"{COORDINATOR_ADDRESS}={address!r} has no port"
        raise ValueError(f"{fact}\nFix: write host:port, such as host:8476.")
    if environ.get(NUM_PROCESSES) == "1":
        return None
    if NUM_PROCESSES in environ or PROCESS_ID in environ:
        names = (COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID)
        if missing := [name for name in names if name not in environ]:
            fact = f"{' and '.join(missing)} not set"
            raise ValueError(f"{fact}\nFix: set {', '.join(names)} in every process, or {ALONE}.")
        return _numbered("hand", environ, NUM_PROCESSES, PROCESS_ID)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        group = _numbered("Open MPI", environ, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
        if group.num_processes == 1:
            return None
        if address is None and "OMPI_MCA_orte_hnp_uri" not in environ:  # as from Open MPI 5 on
            raise ValueError(
                f"{COORDINATOR_ADDRESS} not set, and this Open MPI does not tell where rank 0 is\n"
                f"Fix: use mpirun -x {COORDINATOR_ADDRESS}=host:port, or set {ALONE}."
            )
        return group
    # In an allocation SLURM_NTASKS and, in a batch script, SLURM_PROCID are set without `srun` too;
    # an interactive step has a single task whatever SLURM_NTASKS says.
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _numbered("Slurm", environ, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return ProcessGroup("Kubernetes", coordinator_address=address)
    if address is not None:
        fact = f"{NUM_PROCESSES} not set"
        raise ValueError(f"{fact}\nFix: set it and {PROCESS_ID} as well, or {ALONE}.")
    return None


def split_address(address: str) -> tuple[str, str]:
    """Host and port of `host:port`; an IPv6 address without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def _numbered(launcher: str, environ: Mapping[str, str], count: str, index: str) -> ProcessGroup:
    """The group whose two numbers have these names."""
    values = environ[count], environ.get(index, "")
    if not all(map(str.isdecimal, values)) or not int(values[1]) < int(values[0]):
        fact = f"{count}={values[0]!r} and {index}={values[1]!r} do not fit together"
        raise ValueError(f"{fact}\nFix: set the number of processes, and an id from 0 below it.")
    num_processes, process_id = map(int, values)
    return ProcessGroup(launcher, num_processes, process_id, environ.get(COORDINATOR_ADDRESS))
