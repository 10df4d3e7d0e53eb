"""Scripts that start several processes of `python -m jaxpar` on a cluster: for Slurm, and for Kubernetes."""

import json
import shlex
from collections.abc import Callable, Sequence

from jaxpar.hosts.distributed import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID

COMMANDS = ("train", "evaluate")
_PORT = 8476  # of process 0 in a pod of its own


def slurm_script(command: Sequence[str], num_processes: int, devices_per_process: int) -> str:
    """A script for `sbatch`: one process a node, with all of its GPUs.

    Raises:
      ValueError: as `launch`.
    """
    check_command(command, num_processes, devices_per_process)
    devices = ",".join(map(str, range(devices_per_process)))
    return f"""\
#!/bin/bash
#SBATCH --job-name=jaxpar
#SBATCH --nodes={num_processes}
#SBATCH --ntasks={num_processes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={devices_per_process}
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
# Two minutes before the time is over: train saves its state and stops; --resume goes on.
#SBATCH --signal=TERM@120

# Submit it in a folder that all nodes share, in an environment that has jaxpar.
# A process takes all GPUs of its node; by itself JAX would take one.
export JAX_LOCAL_DEVICE_IDS={devices}
srun --kill-on-bad-exit=1 --label python -m jaxpar {shlex.join(command)}
"""


def jobset_manifest(command: Sequence[str], num_processes: int, devices_per_process: int) -> str:
    """A Kubernetes JobSet for `kubectl create -f`: one process a pod, each with its own GPUs.

    Raises:
      ValueError: as `launch`.
    """
    check_command(command, num_processes, devices_per_process)
    argv = json.dumps(["python", "-m", "jaxpar", *command])  # JSON is YAML too
    return f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: jaxpar
spec:
  failurePolicy:
    maxRestarts: 0 # one failed pod ends them all
  replicatedJobs:
  - name: workers
    replicas: 1
    template:
      spec:
        parallelism: {num_processes}
        completions: {num_processes}
        completionMode: Indexed
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120 # train saves its state and stops
            containers:
            - name: jaxpar
              image: IMAGE # fill in: one that has jaxpar, and JAX for your devices
              command: {argv}
              workingDir: /mnt/runs
              env:
              - name: {COORDINATOR_ADDRESS}
                value: jaxpar-workers-0-0.jaxpar:{_PORT}
              - name: {NUM_PROCESSES}
                value: "{num_processes}"
              - name: {PROCESS_ID}
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
              ports:
              - containerPort: {_PORT}
              resources:
                limits:
                  nvidia.com/gpu: {devices_per_process}
              volumeMounts:
              - name: runs
                mountPath: /mnt/runs
            volumes:
            - name: runs
              persistentVolumeClaim:
                claimName: CLAIM # fill in: a volume that all pods can write to
"""


TEMPLATES: dict[str, Callable[[Sequence[str], int, int], str]] = {
    "slurm": slurm_script,
    "jobset": jobset_manifest,
}


def check_command(command: Sequence[str], num_processes: int, devices_per_process: int) -> None:
    """Raises a ValueError if a number is not positive, or the command is not one for several processes."""
    if num_processes < 1 or devices_per_process < 1:
        raise ValueError(
            f"processes={num_processes}, devices_per_process={devices_per_process}: "
            f"use at least 1 of each"
        )
    if not command or command[0] not in COMMANDS:
        given = repr(command[0]) if command else "nothing"
        raise ValueError(
            f"launch was given {given} to start; write {' or '.join(COMMANDS)} and its arguments "
            f"after --, such as: launch --processes 2 -- train lm --mesh dp2"
        )
