"""Joins the processes of a program and ends them together; see `group` for how they are found."""

import contextlib
import hashlib
import hmac
import importlib.metadata
import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import jax

from jaxpar.base import output
from jaxpar.base.checks import see
from jaxpar.base.jax_private import ClusterEnv
from jaxpar.base.types import JsonValue
from jaxpar.hosts.agree import (
    DifferentError,
    SharedError,
    agree,
    describe_processes,
    in_process_0,
    say,
    tell_failure,
    together,
    waiting,
)
from jaxpar.hosts.group import (
    ALONE,
    BIND_ADDRESS,
    COORDINATOR_ADDRESS,
    NUM_PROCESSES,
    PROCESS_ID,
    SECRET,
    ProcessGroup,
    find_processes,
    split_address,
)
from jaxpar.hosts.stopping import LostProcessError

# What makes another program of the same sources, or other numbers of the same program.
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint")
# Settings of JAX by which the same seed gives other random numbers, or the same numbers are of another type.
OF_NUMBERS = (
    "jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl",
    "jax_random_seed_offset", "jax_high_dynamic_range_gumbel", "jax_accurate_erf_inv",
)  # fmt: skip
# Those by which a program is another one, or rounds in another way.
_FLAGS = (
    *OF_NUMBERS, "jax_default_matmul_precision", "jax_explicit_x64_dtypes",
    "jax_allow_f16_reductions", "jax_softmax_custom_jvp", "jax_use_hlo_logistic_lowering",
    "jax_use_shardy_partitioner", "jax_optimization_level", "jax_disable_most_optimizations",
)  # fmt: skip
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# What is written down of a program, and where; how many devices there are is compared as such.
_HARMLESS = re.compile(r"xla_((\w+_)?dump_\w+|force_host_platform_device_count|gpu_cuda_data_dir)")

START_SECONDS = "JAXPAR_START_SECONDS"  # how long processes wait for each other
# A process that is gone is missed after this time (JAX waits for 100 s), and the others end. One that stands
# still for less than half of it is not: heartbeats come twice in that time.
HEARTBEAT_TIMEOUT_SECONDS = 45
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
    seconds = _start_seconds()
    # Its handler would swallow SIGTERM, which ends a run with its state saved.
    jax.config.update("jax_enable_preemption_service", False)
    address, count, index = group.coordinator_address, group.num_processes, group.process_id
    if address is None or count is None or index is None:
        address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
            address, count, index, None, None, int(seconds)
        )
    if address is None or count is None or index is None:
        raise ValueError(
            f"JAX does not find the processes that {group.launcher} started\n"
            f"Fix: set {COORDINATOR_ADDRESS}, {NUM_PROCESSES} and {PROCESS_ID} in each, or {ALONE}."
        )
    sys.excepthook = _leave_on_error
    _join(address, count, index, seconds, "deactivate" if group.launcher == "hand" else None)
    output.share_streams()
    _check_secret(os.environ.get(SECRET, "").encode())
    facts = {"the number of processes": count, **program_facts()}
    agree(facts, remedy="start all of them in the same way", last=True)
    return group


def _join(address: str, count: int, index: int, seconds: float, method: str | None) -> None:
    """Returns when JAX has all processes together.

    JAX would hear no signal meanwhile, and abort the process in the end.
    """
    bind_address = None
    if index == 0:
        bind_address = os.environ.get(BIND_ADDRESS) or listen_on(address)
        _check_port(bind_address or f"0.0.0.0:{split_address(address)[1]}")
    joining = ThreadPoolExecutor(1).submit(
        jax.distributed.initialize,
        coordinator_address=address,
        coordinator_bind_address=bind_address,
        num_processes=count,
        process_id=index,
        cluster_detection_method=method,
        initialization_timeout=int(2 * seconds),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
    )
    for passed in waiting(seconds):
        if passed:  # not reached: tests do not wait for so long
            say(f"process {index} has waited {passed:.0f} s for all {count} processes at {address}")
        with contextlib.suppress(TimeoutError):
            return joining.result(0.5)
    raise ValueError(
        f"not all {count} processes came to {address} in {seconds:.0f} s (this is process {index})\n"
        f"Fix: give all of them the address of process 0, or correct {NUM_PROCESSES}."
        f"{see('Not all processes came')}"
    )


def listen_on(address: str) -> str | None:
    """The address that process 0 binds to: the one that the others know, and no other.

    Args:
      address: host:port, as all processes know it.
    Returns:
      ip:port; None where that is not known here, so all interfaces are needed: the name means this machine
      itself here, and something else to the others (127.0.1.1 in Debian's /etc/hosts), or the address is that
      of a gateway.
    """
    host, port = split_address(address)
    try:
        family, _, _, _, found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        ip = str(found[0])
        if ipaddress.ip_address(ip).is_loopback and host not in ("localhost", ip):
            return None
        with socket.socket(family) as probe:
            probe.bind((ip, 0))
    except OSError:  # unknown, or of another machine
        return None
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def _check_port(bind_address: str) -> None:
    """Raises an OSError if another program has the port: gRPC would share it with another coordinator."""
    host, port = split_address(bind_address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, int(port)), family=family).close()


def _check_secret(secret: bytes) -> None:
    """Raises in all processes if some have another secret; what they tell each other does not show it.

    Raises:
      DifferentError: names them.
    """
    drawn = in_process_0(secrets.token_hex)

    def proof(who: object) -> str:
        return hmac.digest(secret, f"{drawn} {who}".encode(), "sha256").hex()

    def prove() -> list[JsonValue]:
        return [proof(jax.process_index())]

    def judge(told: Mapping[int, list[JsonValue]]) -> list[JsonValue]:
        others = [number for number, [said] in told.items() if said != proof(number)]
        return [others, proof(others)]

    others, of_process_0 = together(prove, judge)
    if others or of_process_0 != proof([]):
        who = describe_processes(others or [0])
        raise DifferentError(f"{who}: {SECRET} differs\nFix: set the same value in all processes.")


def program_facts() -> dict[str, str]:
    """What must be the same in all processes of a program, and is kept with a run.

    Of the settings of JAX it has those that this version of JAX knows.
    """
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(str(path.relative_to(package)).encode() + path.read_bytes())
    version = sys.modules[package.name].__version__
    return {
        "jaxpar": f"{version} (sources {sources.hexdigest()[:12]})",
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        **{name: str(getattr(jax.config, name)) for name in _FLAGS if hasattr(jax.config, name)},
        **{f"{name} {flag}": value for name in _VARIABLES for flag, value in _flags_of(name)},
    }


def _flags_of(variable: str) -> Iterator[tuple[str, str]]:
    """The compiler's flags in a variable of the environment that may change a program."""
    flags = (flag.lstrip("-").partition("=") for flag in os.environ.get(variable, "").split())
    # The last of several values counts.
    found = {name: value if equals else "true" for name, equals, value in flags}
    yield from ((name, found[name]) for name in sorted(found) if not _HARMLESS.fullmatch(name))


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
    if isinstance(error, LostProcessError):
        say(f"error: {error}")
    else:
        traceback.print_exception(kind, error, trace)
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    leave_processes(code, f"{kind.__name__}: {error}", error)


def _start_seconds() -> float:
    """How long processes wait for each other."""
    text = os.environ.get(START_SECONDS, "300")
    if not text.isdecimal() or not int(text):
        fact = f"{START_SECONDS}={text!r} is not a number of seconds"
        raise ValueError(f"{fact}\nFix: use a whole number of seconds, such as 300.")
    return float(text)
