"""Who belongs together: what the environment of a process tells of its group."""

import pytest

from jaxpar.hosts.group import ProcessGroup, find_processes

BY_HAND = {
    "JAX_COORDINATOR_ADDRESS": "a.b:1", "JAXPAR_NUM_PROCESSES": "4", "JAXPAR_PROCESS_ID": "3",
}  # fmt: skip
SLURM_STEP = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
}  # fmt: skip
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}

GROUPS = {
    "nothing": ({}, None),
    "by hand": (BY_HAND, ProcessGroup("hand", 4, 3, "a.b:1")),
    "by hand, before Slurm": (SLURM_STEP | BY_HAND, ProcessGroup("hand", 4, 3, "a.b:1")),
    "alone on request": (SLURM_STEP | {"JAXPAR_NUM_PROCESSES": "1"}, None),
    "srun": (SLURM_STEP, ProcessGroup("Slurm", 2, 1)),
    "srun of one task": (SLURM_STEP | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
    "a shell in an allocation": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, None),
    "a batch script": (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        None,
    ),
    "an interactive step": (SLURM_STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    "mpirun": (OPEN_MPI, ProcessGroup("Open MPI", 2, 1)),
    "mpirun of one": (
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None,
    ),
    "an indexed pod": (POD | {"JOB_COMPLETION_INDEX": "1"}, ProcessGroup("Kubernetes")),
    "any other pod": (POD, None),
}  # fmt: skip

INCOMPLETE = {
    "no id": (
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAXPAR_NUM_PROCESSES": "2"},
        r"JAXPAR_PROCESS_ID not set\nFix: set .* in every process, or JAXPAR_NUM_PROCESSES=1 to run",
    ),
    "id alone": (
        {"JAXPAR_PROCESS_ID": "0"}, r"JAX_COORDINATOR_ADDRESS and JAXPAR_NUM_PROCESSES not set",
    ),
    "address alone": ({"JAX_COORDINATOR_ADDRESS": "a:1"}, r"JAXPAR_NUM_PROCESSES not set"),
    "no port": (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "a.b"}, r"'a\.b' has no port"),
    "id out of range": (
        BY_HAND | {"JAXPAR_PROCESS_ID": "4"}, r"(?s)JAXPAR_PROCESS_ID='4' do not fit together.* an id from 0",
    ),
    "no number": (
        BY_HAND | {"JAXPAR_NUM_PROCESSES": "two"}, r"JAXPAR_NUM_PROCESSES='two' .*do not fit together",
    ),
    "Open MPI 5": (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        r"does not tell where rank 0 is\nFix: use mpirun -x JAX_COORDINATOR_ADDRESS=host:port",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_environment_tells_the_group(name):
    environ, group = GROUPS[name]
    assert find_processes(environ) == group


@pytest.mark.parametrize("name", INCOMPLETE)
def test_incomplete_settings_are_refused(name):
    environ, message = INCOMPLETE[name]
    with pytest.raises(ValueError, match=message):
        find_processes(environ)
