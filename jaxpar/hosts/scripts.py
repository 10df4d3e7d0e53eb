"""Scripts that start several processes of `python -m jaxpar` on a cluster: for Slurm, and for Kubernetes.

One script serves the first start of a run and every other: after the time limit, a preemption, a node that
failed. It names the run's folder, and `train` continues with what it finds there.
"""

import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxpar.base.bucket import SCHEME
from jaxpar.base.display import format_count
from jaxpar.hosts.group import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID

Platform = Literal["gpu", "cpu"]

COMMANDS = ("train", "evaluate", "predict", "export")
OUT_DIR = "--train.out-dir"
NOTICE_SECONDS = 120  # before the end that the cluster has set
MAX_RESTARTS = 100  # of a JobSet, so that one that always fails ends some day
STOPPED = 128 + 15  # the exit code of a run that SIGTERM has ended, with its state saved
_PORT = 8476  # of process 0 in a pod of its own
_VOLUME = "/mnt/runs"
_MOUNT = f"""
              - name: runs
                mountPath: {_VOLUME}"""
_CLAIM = """
            - name: runs
              persistentVolumeClaim:
                claimName: CLAIM # fill in: one for all pods; or use --train.out-dir gs://BUCKET/FOLDER"""
_ACCOUNT = """
            serviceAccountName: ACCOUNT # fill in: one that may write to the bucket"""
_REQUEUE = f"""
code=$?
if {{again}}; then # {STOPPED}: by SIGTERM, with its state saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code"""


def slurm_script(
    command: Sequence[str],
    num_processes: int,
    devices_per_process: int,
    platform: Platform = "gpu",
    min_processes: int | None = None,
) -> str:
    """A script for `sbatch`: one process per node, which has the node to itself.

    When `train` was stopped by SIGTERM, which Slurm sends some time before the limit, the script asks for
    its job to be requeued. `scancel` ends the script as well, and the job stays cancelled.

    Args:
      platform: of the devices: "gpu", or "cpu", whose devices share the cores of their node.
      min_processes: for an elastic command: the job runs on as many nodes as Slurm has for it, not fewer than
        these, and is requeued after any failure that another start may fix.
    Raises:
      ValueError: as `launch`, or the command would not continue its run when it is started again.
    """
    check_command(command, num_processes, devices_per_process)
    gpus, variables = "", f"export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={devices_per_process}\n"
    if platform == "gpu":
        gpus = f"#SBATCH --gpus-per-node={devices_per_process}\n"
        devices = ",".join(map(str, range(devices_per_process)))
        variables = (
            f"# A process takes all GPUs of its node; by itself JAX would take one.\n"
            f"export JAX_LOCAL_DEVICE_IDS={devices}\n"
        )
    nodes, again = str(num_processes), f"[ $code = {STOPPED} ]"
    tasks = f"#SBATCH --ntasks={num_processes}\n#SBATCH --ntasks-per-node=1\n"
    if min_processes is not None:
        # There is one task on each node by default. Told so, Slurm takes the fewest nodes.
        nodes, tasks = f"{min_processes}-{num_processes}", ""
        failed = "[ $code != 0 ] && [ $code != 2 ] && [ $code != 3 ]"  # as of `jobset_manifest`
        again += f" || {{ {failed} && [ ${{SLURM_RESTART_COUNT:-0}} -lt {MAX_RESTARTS} ]; }}"
    more = how_to_go_on(command, '"$out_dir"')
    if '"$out_dir"' in more:
        variables = f"out_dir=runs/slurm-$SLURM_JOB_ID\n{variables}"
    return _fill_in(
        "slurm.sh",
        nodes=nodes,
        tasks=tasks,
        gpus=gpus,
        notice_seconds=NOTICE_SECONDS,
        variables=variables,
        run=" ".join(["python -m jaxpar", shlex.join(command), *more]),
        requeue=_REQUEUE.format(again=again) if command[0] == "train" else "",
    )


def jobset_manifest(
    command: Sequence[str], num_processes: int, devices_per_process: int, platform: Platform = "gpu"
) -> str:
    """A Kubernetes JobSet for `kubectl create -f`: one process per pod, each with its own devices.

    When a pod fails, is evicted or stopped, all are started again. A user's mistake (exit code 2) or a number
    that is not finite (3) would occur again, and ends them. The run is on a volume that all pods mount, or
    in a bucket, if `--train.out-dir` of the command is gs://BUCKET/FOLDER.

    Args:
      platform: as of `slurm_script`.
    Raises:
      ValueError: as of `slurm_script`.
    """
    check_command(command, num_processes, devices_per_process)
    argv = ["python", "-m", "jaxpar", *command, *how_to_go_on(command, "runs/jaxpar")]
    if platform == "gpu":
        variables, limit = "", f"nvidia.com/gpu: {devices_per_process}"
    else:
        variables = f"""
              - name: JAX_PLATFORMS
                value: cpu
              - name: JAX_NUM_CPU_DEVICES
                value: "{devices_per_process}\""""
        limit = "cpu: CORES # fill in: of a node"
    in_bucket = options_of(argv).get(OUT_DIR, "").startswith(SCHEME)
    return _fill_in(
        "jobset.yaml",
        max_restarts=MAX_RESTARTS,
        num_processes=num_processes,
        notice_seconds=NOTICE_SECONDS,
        argv=json.dumps(argv),
        coordinator_name=COORDINATOR_ADDRESS,
        num_processes_name=NUM_PROCESSES,
        process_id_name=PROCESS_ID,
        port=_PORT,
        variables=variables,
        limit=limit,
        package="jaxpar[gcs]" if in_bucket else "jaxpar",
        account=_ACCOUNT if in_bucket else "",
        working_dir="" if in_bucket else f"\n              workingDir: {_VOLUME}",
        mount="" if in_bucket else _MOUNT,
        volume="" if in_bucket else _CLAIM,
    )


def _fill_in(template: str, **values: object) -> str:
    return Path(__file__).with_name(template).read_text("utf-8").format(**values)


def check_command(command: Sequence[str], num_processes: int, devices_per_process: int) -> None:
    """Raises a ValueError if a number is not positive, or the command not one for several processes."""
    if num_processes < 1 or devices_per_process < 1:
        raise ValueError(
            f"processes={num_processes}, devices_per_process={devices_per_process}: "
            f"use at least 1 of each"
        )
    if not command or command[0] not in COMMANDS:
        given = repr(command[0]) if command else "nothing"
        raise ValueError(
            f"launch was given {given} to start; write {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]} and its "
            f"arguments after --, such as: launch --processes 2 -- train lm --mesh dp2"
        )
    if "--simulate" in options_of(command):
        raise ValueError(
            f"launch gives each process {format_count(devices_per_process, 'device')}; leave --simulate out "
            f"after --, and use --devices-per-process"
        )


def options_of(command: Sequence[str]) -> dict[str, str]:
    """The options in a command, each with what follows it."""
    found = {}
    for argument, following in itertools.zip_longest(command, command[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            found[name.replace("_", "-")] = value if equals else following
    return found


def how_to_go_on(command: Sequence[str], out_dir: str) -> list[str]:
    """What to add to a command, so that it begins a run or continues it.

    Args:
      out_dir: for a run that has no folder of its own.
    Raises:
      ValueError: the command removes what is there, and a second start would do so too.
    """
    options = options_of(command)
    if command[0] != "train":
        return []
    if "--overwrite" in options:
        raise ValueError(
            "--overwrite would remove the run whenever it is started again; leave it out: remove the folder "
            "by hand, or name another --train.out-dir"
        )
    says_how = options.keys() & {"--resume", "--resume-or-begin"}
    where = [] if OUT_DIR in options else [OUT_DIR, out_dir]
    return where + ([] if says_how else ["--resume-or-begin"])
