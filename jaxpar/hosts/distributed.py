"""How the processes of one program find each other, and part; see `group` for who they are."""

import contextlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from types import TracebackType

import jax
from jax._src.clusters import ClusterEnv  # there is no public way to what JAX asks a launcher

from jaxpar.hosts.agree import DifferentError, SharedError, tell_failure
from jaxpar.hosts.group import (
    ALONE,
    BIND_ADDRESS,
    COORDINATOR_ADDRESS,
    NUM_PROCESSES,
    PROCESS_ID,
    ProcessGroup,
    find_processes,
)
from jaxpar.hosts.rendezvous import listen_on, meet, program_facts
from jaxpar.output import dropping

START_SECONDS = "JAXPAR_START_SECONDS"  # how long processes wait for each other
_BY_HAND_SECONDS = 50.0
_CLUSTER_SECONDS = 300.0  # whose launcher knows the number, and whose machines may be slow to start

# A process that is gone is missed after this time (JAX waits for 100 s), and the others end.
HEARTBEAT_TIMEOUT_SECONDS = 30
_LEAVE_SECONDS = 20.0  # that a process which fails has for telling the others, and parting


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
            f"(python -m jaxpar launch --print jobset), or {ALONE}"
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
    bind_address = os.environ.get(BIND_ADDRESS) or (listen_on(address) if index == 0 else None)
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


def leave_processes(code: int, reason: str, error: BaseException | None = None) -> int:
    """Ends this process at once if there are others; else gives the exit code back.

    For a process that fails: at an ordinary exit JAX waits for the others, and they, in the middle
    of a step, for this one. When it is gone they fail too. Before the run has begun it tells them why.

    Args:
      reason: that the others are told.
      error: where all raise the same one, each of them has the time to say why.
    """
    if jax.distributed.is_initialized():
        is_shared = isinstance(error, SharedError | DifferentError)
        thread = threading.Thread(target=_part, args=(reason, is_shared), daemon=True)
        thread.start()
        thread.join(_LEAVE_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _part(reason: str, is_shared: bool) -> None:
    """Parts from the others, if they know or can be told, so that none ends for the loss of another."""
    with contextlib.suppress(RuntimeError):  # they are gone
        if is_shared or tell_failure(reason):
            jax.distributed.shutdown()


def _leave_on_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    traceback.print_exception(kind, error, trace)
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    leave_processes(code, f"{kind.__name__}: {error}", error)


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
