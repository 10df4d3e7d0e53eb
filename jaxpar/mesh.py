"""Device meshes: from `MeshConfig` to `jax.sharding.Mesh`, on real, simulated or planned devices.

`MeshConfig` is plain data: JAX is imported by what makes or finds devices.
"""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar.base.axes import DATA, MESH_AXES, STAGE, TENSOR
from jaxpar.base.checks import check_fields, require, require_instance, see
from jaxpar.base.display import Shown, format_count
from jaxpar.base.loading import guard_remedy
from jaxpar.base.output import PROGRAM

if TYPE_CHECKING:
    from jax.sharding import Mesh

MAX_SIMULATED = 1024  # devices, each with a thread of its own
SHORT_NAMES = {"dp": DATA, "pp": STAGE, "tp": TENSOR}
_AXIS = "[a-z_]+"  # the name of an axis


@dataclasses.dataclass(frozen=True)
class MeshConfig(Shown):
    """The shape of the device mesh, and the devices in it.

    Attributes:
      data: Number of data-parallel groups. Each gets some rows of the batch.
      stage: Number of pipeline stages. Each stores some of the layers.
      tensor: Number of devices that each weight matrix is sharded over.
      axes: Your own axes, (name, size) each, which layers may use by their names (`Task.axes`).
      devices: Numbers of the devices to use, as in `jax.devices()`. None takes all of them.

    One of the sizes may be -1: it is inferred from the number of devices.

    Raises:
      ValueError: a size is not positive (nor a single -1), an axis has no usable name, or a device number is
        repeated.

    Example:
      mesh = jaxpar.MeshConfig(data=2, stage=2, tensor=2)
      assert mesh == jaxpar.MeshConfig.parse("dp2pp2tp2")
    """

    data: int = 1
    stage: int = 1
    tensor: int = 1
    devices: tuple[int, ...] | None = None
    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self):
        check_fields(self)
        names, taken = [name for name, _ in self.axes], (*MESH_AXES, *SHORT_NAMES)
        for name in names:
            if not re.fullmatch(_AXIS, name) or name in taken or names.count(name) > 1:
                raise ValueError(
                    f"mesh axes={self.axes}: {name!r} cannot be the name of an axis\n"
                    f"Fix: use lower-case letters, each name once, other than {', '.join(taken)}."
                )
        for axis, size in self.sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"mesh {axis}={size}\nFix: use 1 or more, or -1 to infer it.")
        if (inferred := [a for a, size in self.sizes.items() if size == -1])[1:]:
            raise ValueError(f"mesh has -1 for {' and '.join(inferred)}\nFix: use -1 for one.")
        numbers = (0,) if self.devices is None else self.devices
        if len({*numbers}) < len(numbers) or min(numbers, default=-1) < 0:
            raise ValueError(
                f"mesh devices={self.devices}\nFix: name one or more of them, each once, from 0."
            )

    @classmethod
    def parse(cls, text: str) -> "MeshConfig":
        """Reads `"dp2pp2tp2"`; axes left out have size 1.

        Other names are your own axes: `"dp2pp2context2"`.

        Raises:
          ValueError: the text has another form, or names an axis twice.
        """
        require_instance("mesh", text, str, 'the shape of one, such as "dp2pp2tp2"')
        text = text.strip()
        require(
            re.fullmatch(rf"({_AXIS}-?\d+)+", text) is not None,
            f"mesh {text!r} is not made of axes and sizes\nFix: write it as dp2pp2tp2.",
        )
        sizes: dict[str, int] = {}
        for name, size in list[tuple[str, str]](re.findall(rf"({_AXIS})(-?\d+)", text)):
            axis = SHORT_NAMES.get(name, name)
            if axis in sizes:
                raise ValueError(f"mesh {text!r} has {axis!r} twice\nFix: name it once.")
            sizes[axis] = int(size)
        own = tuple((axis, size) for axis, size in sizes.items() if axis not in MESH_AXES)
        data, stage, tensor = (sizes.get(axis, 1) for axis in MESH_AXES)
        return cls(data, stage, tensor, axes=own)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, outermost first; -1 where it is still to be inferred."""
        return {DATA: self.data, STAGE: self.stage, **dict(self.axes), TENSOR: self.tensor}

    def replace(self, axis: str, size: int) -> "MeshConfig":
        """With another size of an axis."""
        if axis in MESH_AXES:
            return dataclasses.replace(self, **{axis: size})
        return dataclasses.replace(self, axes=tuple({**dict(self.axes), axis: size}.items()))

    def of_task(self, task: str, axes: Sequence[str]) -> "MeshConfig":
        """With those of a task's own axes that are missing, of size 1.

        Args:
          task: its name; `axes` those that it knows.
        Raises:
          ValueError: the mesh has an axis that the task does not know.
        """
        for axis, _ in self.axes:
            if axis not in axes:
                known = (*MESH_AXES, *axes)
                raise ValueError(
                    f"mesh {self}: unknown axis {axis!r} of task {task}\n"
                    f"Fix: use {', '.join(known)}."
                )
        return dataclasses.replace(self, axes=tuple((a, dict(self.axes).get(a, 1)) for a in axes))

    @property
    def num_devices(self) -> int:
        """Devices that the mesh needs; a size that is still to be inferred counts as one."""
        return math.prod(size for size in self.sizes.values() if size != -1)

    def resolve(self, num_available: int | None = None) -> "MeshConfig":
        """This mesh with its -1 inferred, for exactly the devices that there are.

        Args:
          num_available: devices to fill; None asks JAX (which starts its backend), or counts `devices`.
        Raises:
          ValueError: the sizes do not multiply to the number of devices, or JAX has none.
        """
        if self.devices is not None:
            num_available = len(self.devices)
        elif num_available is None:
            num_available = len(find_devices())
        inferred = [axis for axis, size in self.sizes.items() if size == -1]
        if inferred:
            if num_available % self.num_devices:
                raise ValueError(
                    f"mesh {self}: {num_available} devices do not divide by {self.num_devices}\n"
                    f"Fix: use sizes that divide {num_available}."
                )
            return self.replace(inferred[0], num_available // self.num_devices)
        wanted = self.num_devices
        if wanted != num_available:
            raise ValueError(
                f"mesh {self} needs {format_count(wanted, 'device')}, got {num_available}\n"
                f"Fix: use sizes that multiply to {num_available}, name {wanted} with devices=(0, ...), "
                f"or simulate {wanted}.{see('The mesh needs 8 devices, got 1')}"
            )
        return self

    def build(self, devices: Sequence[Any] | None = None) -> "Mesh":
        """The mesh over devices, axes (data, stage, your own, tensor), all of type Auto.

        Devices are ordered by process, so that `tensor` (the axis with most traffic) stays inside a host
        where it fits, and `data` is the one that crosses hosts. In one process a mesh that is smaller than
        the machine takes the first devices.

        Args:
          devices: those of `described_devices`, to compile for; None takes all that JAX has.
        Raises:
          ValueError: there are too few devices, or in several processes too many; a device number does not
            exist, or JAX has no devices.
        """
        import jax
        from jax.experimental import mesh_utils

        is_alone = devices is not None or jax.process_count() == 1
        devices = sorted(devices or find_devices(), key=lambda d: (d.process_index, d.id))
        if self.devices is not None:
            missing = [number for number in self.devices if number >= len(devices)]
            if missing:
                raise ValueError(
                    f"mesh devices={self.devices}: there is no device {missing[0]}\n"
                    f"Fix: use numbers up to {len(devices) - 1}."
                )
            devices = [devices[number] for number in self.devices]
        elif -1 not in self.sizes.values() and is_alone:
            devices = devices[: self.num_devices]
        sizes = self.resolve(len(devices)).sizes
        # An axis of a TPU's torus may have to be split between two of the mesh. `jax.make_mesh` does so on
        # v5e alone, and refuses it on other TPUs.
        placed = mesh_utils.create_device_mesh(
            tuple(sizes.values()), devices, allow_split_physical_axes=True
        )
        types = (jax.sharding.AxisType.Auto,) * len(sizes)
        return jax.sharding.Mesh(placed, tuple(sizes), axis_types=types)

    def __str__(self) -> str:
        return short_name(self)


def short_name(mesh: MeshConfig) -> str:
    """dp2pp4, without the axes of size 1."""
    short = {axis: name for name, axis in SHORT_NAMES.items()}
    sizes = (f"{short.get(axis, axis)}{n}" for axis, n in mesh.sizes.items() if n != 1)
    return "".join(sizes) or "dp1"


# All devices share the batch: the mesh where none is given.
DATA_PARALLEL = MeshConfig(data=-1)
ONE_DEVICE = MeshConfig(devices=(0,))


def simulate_devices(num_devices: int) -> None:
    """Makes JAX show this machine's CPU as `num_devices` devices, and use no others.

    They share the machine's cores: they show correctness, bytes and memory, not speed. This works after
    `import jax`, until the first use of a device starts JAX's backend. On Linux this process keeps freed
    memory for the next step, which makes steps up to 1.2 times as fast. SciPy's LAPACK, which draws
    orthogonal kernels, uses one thread, unless `OPENBLAS_NUM_THREADS` says otherwise.

    Raises:
      ValueError: `num_devices` is not positive, or more than one process can simulate; or the backend has
        started with other devices.

    Example:
      jaxpar.simulate_devices(8)
      print(len(jax.devices()))  # 8
    """
    import jax

    require_instance("num_devices", num_devices, int, "a whole number")
    if not 1 <= num_devices <= MAX_SIMULATED:
        raise ValueError(
            f"simulate_devices({num_devices}): must be from 1 to {MAX_SIMULATED}\n"
            f"Fix: for more devices use {PROGRAM} plan --machine h100:1x256x8."
        )
    _keep_freed_memory()
    # Every device calls it; their threads would wait for each other, spinning: ten times as long on 2 cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        found = jax.devices()
        if len(found) == num_devices and all(d.platform == "cpu" for d in found):
            return
        remedy = guard_remedy(f"simulate_devices({num_devices})") or (
            "call it before anything touches a device, or restart the notebook's kernel"
        )
        raise ValueError(
            f"simulate_devices({num_devices}): JAX has already started with {len(found)} "
            f"{found[0].platform} device(s)\nFix: {remedy}."
        ) from error


# What libtpu asks a cloud for where there is no TPU.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


# The sides of a pod in chips, by Google Cloud's pages on each: no slice is larger, none has a longer side.
_TPUS = {"v5e": (16, 16), "v5p": (16, 20, 28), "v6e": (16, 16)}
_GPUS = {path.stem: path for path in Path(__file__).with_name("gpus").iterdir()}


def split_machine(machine: str) -> tuple[str, tuple[int, ...]]:
    """The name of the devices of a machine, and its sides.

    Args:
      machine: a TPU slice by its sides in chips, such as "v5e:4x8", "v5p:2x2x2" or "v6e:2x4"; or GPUs, as
        partitions x hosts x GPUs of each, such as "h100:1x2x8" (also h200, a100 and b200).
    Raises:
      ValueError: there is no such machine.
    """
    require_instance("machine", machine, str, 'the name of one, such as "v5e:4x8" or "h100:1x2x8"')
    name, _, sides = machine.partition(":")
    if name not in (*_TPUS, *_GPUS) or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", sides):
        raise ValueError(
            f"machine {machine!r}: must be one of {', '.join([*_TPUS, *sorted(_GPUS)])} with its sides\n"
            f"Fix: write chips, such as v5e:4x8, or partitions x hosts x GPUs, such as h100:1x2x8."
        )
    shape, pod = tuple(map(int, sides.split("x"))), _TPUS.get(name)
    if pod and (math.prod(shape) > math.prod(pod) or max(shape) > max(pod)):
        whole = "x".join(map(str, pod))
        raise ValueError(
            f"machine {machine!r}: there is no such slice: a pod of {name} has {whole} chips\n"
            f"Fix: use a slice of a pod, with sides up to {max(pod)}."
        )
    return name, shape


class NoCompilerError(ValueError):
    """The compiler for a machine is not installed."""


def described_devices(machine: str) -> list[Any]:
    """Devices of a machine that need not be there: programs can be compiled for them, and not run.

    Args:
      machine: as of `split_machine`.
    Raises:
      NoCompilerError: no compiler for it is installed.
      ValueError: there is no such machine.
    """
    from jax.experimental import topologies

    name, sides = split_machine(machine)
    is_tpu = name in _TPUS
    how: dict[str, Any] = {"platform": "tpu", "topology_name": machine}
    if not is_tpu:
        topology = "x".join(map(str, sides))
        how = {"platform": "cuda", "target_config": _GPUS[name].read_text(), "topology": topology}
    for key, value in _NO_TPU.items() if is_tpu else ():
        os.environ.setdefault(key, value)
    try:
        return list(topologies.get_topology_desc(**how).devices)
    except (RuntimeError, NotImplementedError) as error:
        if "not i" in str(error):  # installed, implemented
            extra = "tpu" if is_tpu else "cuda13"
            fact = f"no compiler for {name} is installed"
            raise NoCompilerError(f"{fact}\nFix: pip install 'jax[{extra}]'.") from error
        raise ValueError(
            f"machine {machine!r} cannot be described: {error}\nFix: use sides such as v5e:4x8."
        ) from error


def num_simulated() -> int | None:
    """How many devices this process simulates, if it is the only one; None if it simulates none."""
    import jax

    number = jax.config.values["jax_num_cpu_devices"]
    is_cpu = jax.devices()[0].platform == "cpu"
    return number if is_cpu and number > 0 and jax.process_count() == 1 else None


def find_devices() -> list[Any]:
    """All that JAX has.

    Raises:
      ValueError: it has none.
    """
    import jax

    try:
        return jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX finds no devices: {error}\nFix: see {PROGRAM} doctor.") from error


def release_freed_memory() -> None:
    """Returns freed memory that this process keeps to the system (Linux): for use before steps, not between.

    Setup leaves memory behind in pieces, none of which a step's one block could use.
    """
    import ctypes

    if (trim := _of_libc("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


def _keep_freed_memory() -> None:
    """Lets glibc give what one step frees to the next.

    By default it returns large blocks to the system and gets them back as pages to be zeroed, which takes a
    sixth of a step's time. The user's own settings are left alone. It affects threads started later: JAX's
    start with its backend. The numbers are those of mallopt(3).
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in (
        os.environ.get("GLIBC_TUNABLES", "")
    )
    mallopt = _of_libc("mallopt")
    if chosen or mallopt is None:  # not reached: tests are on Linux and leave the settings alone
        return
    mmap_max, trim_threshold, arena_max = -4, -1, -8
    for parameter, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (arena_max, 1)):
        mallopt(parameter, value)


def _of_libc(name: str) -> Any:
    """A function of the system's C library, on Linux; None if it has none of that name."""
    import ctypes

    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
