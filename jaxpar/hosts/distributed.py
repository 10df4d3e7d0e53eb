"""Several processes, one program: whether this is one of them, and how they find each other.

The same command runs under every launcher; its environment says which one it was:

    by hand     JAX_COORDINATOR_ADDRESS=host:port JAXPAR_NUM_PROCESSES=2 JAXPAR_PROCESS_ID=0
    Slurm       srun --ntasks=2 python -m jaxpar train lm ...
    Open MPI    mpirun -n 2 python -m jaxpar train lm ...
    Kubernetes  the pods of an indexed Job or JobSet

`JAXPAR_NUM_PROCESSES=1` makes any of them a process that runs alone.
"""

import dataclasses
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType

import jax
from jax._src.clusters import ClusterEnv  # there is no public way to what JAX asks a launcher
from jax.experimental import multihost_utils

from jaxpar.hosts.agreement import shut_down, tell_failure
from jaxpar.hosts.interface import listen_on
from jaxpar.hosts.meeting import meet, program_facts
from jaxpar.hosts.together import SharedError
from jaxpar.output import dropping

COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"  # JAX reads this one too
BIND_ADDRESS = (
    "JAX_COORDINATOR_BIND_ADDRESS"  # of process 0, if all interfaces or another one are needed
)
NUM_PROCESSES, PROCESS_ID = "JAXPAR_NUM_PROCESSES", "JAXPAR_PROCESS_ID"
START_SECONDS = "JAXPAR_START_SECONDS"  # how long processes wait for each other
_ALONE = f"{NUM_PROCESSES}=1 to run alone"
_BY_HAND_SECONDS = 50.0
_CLUSTER_SECONDS = 300.0  # whose launcher knows the number, and whose machines may be slow to start

# A process that is gone is missed after this time (JAX waits for 100 s), and the others end.
HEARTBEAT_TIMEOUT_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that run one program, as far as the environment of one of them tells.

    Attributes:
      launcher: who started them: "hand", "Slurm", "Open MPI" or "Kubernetes".
      num_processes: None if JAX is to ask the launcher.
      process_id: of this process; None likewise.
      coordinator_address: host:port of process 0; None likewise.
      num_hosts: the machines they run on; None if the environment does not tell.
    """

    launcher: str
    num_processes: int | None = None
    process_id: int | None = None
    coordinator_address: str | None = None
    num_hosts: int | None = None


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
        raise ValueError(
            f"{COORDINATOR_ADDRESS}={address!r} has no port; write host:port, "
            f"such as {address.rstrip(':') or 'host'}:8476"
        )
    if environ.get(NUM_PROCESSES) == "1":
        return None
    if NUM_PROCESSES in environ or PROCESS_ID in environ:
        names = (COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID)
        if missing := [name for name in names if name not in environ]:
            raise ValueError(
                f"{_given(environ, *names)} is set, {' and '.join(missing)} not; set all three "
                f"in every process, or {_ALONE}"
            )
        return _numbered("hand", environ, NUM_PROCESSES, PROCESS_ID)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        group = _numbered("Open MPI", environ, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
        if group.num_processes == 1:
            return None
        if address is None and "OMPI_MCA_orte_hnp_uri" not in environ:  # as from Open MPI 5 on
            raise ValueError(
                f"OMPI_COMM_WORLD_SIZE={group.num_processes} processes were started by this Open "
                f"MPI, but it does not tell JAX where process 0 is; use mpirun -x "
                f"{COORDINATOR_ADDRESS}=host:port with the host of rank 0, or set {_ALONE}"
            )
        on_this_host = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
        one_host = on_this_host == environ["OMPI_COMM_WORLD_SIZE"]
        return dataclasses.replace(group, num_hosts=1 if one_host else None)
    # In an allocation SLURM_NTASKS and, in a batch script, SLURM_PROCID are set without `srun` too;
    # an interactive step has a single task whatever SLURM_NTASKS says.
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        group = _numbered("Slurm", environ, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
        num_hosts = environ.get("SLURM_STEP_NUM_NODES")
        return dataclasses.replace(group, num_hosts=None if num_hosts is None else int(num_hosts))
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return ProcessGroup("Kubernetes", coordinator_address=address)
    if address is not None:
        raise ValueError(
            f"{COORDINATOR_ADDRESS}={address!r} is set, but not how many processes there are; set "
            f"{NUM_PROCESSES} and {PROCESS_ID} as well, or {_ALONE}"
        )
    return None


def start_processes() -> ProcessGroup | None:
    """Joins this process with the others of its group; None if it runs alone, in which case nothing is done.

    Call it before anything touches a device. `jax.devices()` are then those of all processes.

    Raises:
      ValueError: settings are incomplete, or not numbers in range; processes are missing, or have other
        versions of jaxpar or JAX.
      OSError: the coordinator's port is in use.
      RuntimeError: JAX has started already.
    """
    group = find_processes(os.environ)
    if group is None:
        return None
    seconds = _start_seconds(os.environ, group)
    if group.launcher == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise ValueError(
            f"JOB_COMPLETION_INDEX={os.environ['JOB_COMPLETION_INDEX']}: in an indexed Kubernetes "
            f"job JAX needs the package kubernetes to find the other pods; pip install "
            f"'jax[k8s]', or set {COORDINATOR_ADDRESS}, {NUM_PROCESSES} and {PROCESS_ID} "
            f"(python -m jaxpar launch --print jobset), or {_ALONE}"
        )
    # Its handler would swallow SIGTERM, which ends a run with its state saved.
    jax.config.update("jax_enable_preemption_service", False)
    address, count, index = group.coordinator_address, group.num_processes, group.process_id
    if address is None or count is None or index is None:
        address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
            address, count, index, None, None, int(seconds)
        )
        assert address is not None
        assert count is not None
        assert index is not None
    bind_address = os.environ.get(BIND_ADDRESS)
    if bind_address is None and index == 0:
        bind_address = listen_on(address)
    meet(address, index, count, program_facts(count), seconds, bind_address)
    jax.distributed.initialize(
        coordinator_address=address,
        coordinator_bind_address=bind_address,
        num_processes=count,
        process_id=index,
        cluster_detection_method="deactivate" if group.launcher == "hand" else None,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
    )
    sys.excepthook = _leave_on_error
    _keep_stdout_for_python()
    return group


def wait_for_processes(event: str) -> None:
    """Returns when all processes have come here; at once in a process that runs alone."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"jaxpar: {event}")


def leave_processes(code: int, reason: str = "it failed", *, shared: bool = False) -> int:
    """Ends this process at once if there are others; else gives the exit code back.

    For a process that fails: at an ordinary exit JAX waits for the others, and they, in the middle
    of a step, for this one. When it is gone they fail too. Before the run has begun it tells them why.

    Args:
      shared: all processes fail, so each of them has the time to say why.
    """
    if jax.distributed.is_initialized():
        if shared:
            shut_down()
        tell_failure(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _leave_on_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    traceback.print_exception(kind, error, trace)
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    leave_processes(code, f"{kind.__name__}: {error}", shared=issubclass(kind, SharedError))


def _keep_stdout_for_python() -> None:
    """Sends what libraries print to stderr.

    Gloo, under JAX's CPU collectives, prints a line for every group of devices, from several
    threads, in pieces that would fall between those of a report.
    """
    if sys.stdout is not sys.__stdout__:
        return  # a notebook's, or a test's: Gloo does not write there
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    descriptor = os.dup(1)
    os.dup2(2, 1)
    stdout = os.fdopen(descriptor, "w", buffering=1, encoding=encoding, errors=errors)
    sys.stdout = dropping(stdout)


def _start_seconds(environ: Mapping[str, str], group: ProcessGroup) -> float:
    """How long processes wait for each other."""
    text = environ.get(START_SECONDS)
    if text is None:
        in_cluster = group.launcher != "hand" or "KUBERNETES_SERVICE_HOST" in environ
        return _CLUSTER_SECONDS if in_cluster else _BY_HAND_SECONDS
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{START_SECONDS}={text!r}: use a whole number of seconds, such as 300")
    return float(text)


def _numbered(launcher: str, environ: Mapping[str, str], count: str, index: str) -> ProcessGroup:
    """The group whose two numbers have these names."""
    values = environ[count], environ.get(index, "")
    if not all(map(str.isdecimal, values)) or not int(values[1]) < int(values[0]):
        raise ValueError(
            f"{count}={values[0]!r}, {index}={values[1]!r} (started by {launcher}): use a whole number of "
            f"processes, and an id from 0 to one less"
        )
    num_processes, process_id = map(int, values)
    return ProcessGroup(launcher, num_processes, process_id, environ.get(COORDINATOR_ADDRESS))


def _given(environ: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)
