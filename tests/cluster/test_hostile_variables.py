"""Variables of launchers that are malformed: each is refused with its value, the rule and the remedy."""

from collections.abc import Mapping

import pytest

from trainkit.cluster.local import detect
from trainkit.errors import ConfigError

REMEDY = "Correct it, or ignore the launch: TRAINKIT_LAUNCHER=none."
HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
STEP = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def told(environ: Mapping[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        detect(environ)
    return [str(problem).removesuffix(" (environment)") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("launch", "changed", "rule"),
    [
        (HAND, {"RANK": "x"}, f"RANK=x: must be a whole number, 0 or more. {REMEDY}"),
        (HAND, {"RANK": "-1"}, f"RANK=-1: must be a whole number, 0 or more. {REMEDY}"),
        (HAND, {"RANK": "²"}, f"RANK=²: must be a whole number, 0 or more. {REMEDY}"),
        (HAND, {"RANK": "2"}, f"RANK=2: must be less than WORLD_SIZE=2. {REMEDY}"),
        (HAND, {"WORLD_SIZE": "1000000000"}, f"WORLD_SIZE=1000000000: must be 100,000 or less. {REMEDY}"),
        (HAND, {"LOCAL_RANK": "x"}, f"LOCAL_RANK=x: must be a whole number, 0 or more. {REMEDY}"),
        (HAND, {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9: must be WORLD_SIZE=2 or less."),
        (HAND, {"MASTER_PORT": "70000"}, f"MASTER_PORT=70000: must be a port, 65535 at most. {REMEDY}"),
        (HAND, {"MASTER_ADDR": "a b"}, f"MASTER_ADDR=a b: must be the name or address of a host. {REMEDY}"),
        (STEP, {"SLURM_PROCID": "9"}, f"SLURM_PROCID=9: must be less than SLURM_NTASKS=2. {REMEDY}"),
        (STEP, {"SLURM_LOCALID": "7"}, "SLURM_LOCALID=7: must be less than the 1 tasks of its node."),
        (STEP, {"SLURM_RESTART_COUNT": "x"}, f"SLURM_RESTART_COUNT=x: must be a whole number, 0 or more. {REMEDY}"),
        (STEP, {"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST: is not a list of nodes: n[1-."),
        (STEP, {"SLURM_STEP_NODELIST": "[1-9999][1-9999]"}, "SLURM_STEP_NODELIST: lists more than 100,000 nodes."),
        (STEP, {"SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE: is not a list of tasks per node: x."),
        (MPI, {"OMPI_COMM_WORLD_RANK": "2"},
         f"OMPI_COMM_WORLD_RANK=2: must be less than OMPI_COMM_WORLD_SIZE=2. {REMEDY}"),
        (PMI, {"PMI_RANK": "x"}, f"PMI_RANK=x: must be a whole number, 0 or more. {REMEDY}"),
        ({}, {"PET_NNODES": "x"}, f"PET_NNODES=x: must be a whole number, 1 or more. {REMEDY}"),
        ({}, {"TF_CONFIG": "3"}, "TF_CONFIG: must be a JSON object with cluster and task."),
        ({}, {"CLUSTER_SPEC": "[]"}, "CLUSTER_SPEC: must be a JSON object with cluster and task."),
    ],
)  # fmt: skip
def test_a_malformed_variable_is_refused(launch: dict[str, str], changed: dict[str, str], rule: str) -> None:
    assert told({**launch, **changed}) == [rule]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_absent_is_named(name: str) -> None:
    environ = {key: value for key, value in HAND.items() if key != name}
    hint = "Set it, or ignore the launch: TRAINKIT_LAUNCHER=none."
    assert told(environ) == [f"{name}: is not set, though RANK is. {hint}"]


@pytest.mark.parametrize("launch", [HAND, STEP, MPI, PMI])
def test_a_number_of_thousands_of_digits_is_no_number(launch: dict[str, str]) -> None:
    name = next(iter(launch)) if launch is not STEP else "SLURM_PROCID"
    (problem,) = told({**launch, name: "1" * 5000})
    assert problem.startswith(f"{name}=111")
    assert problem.endswith(f"must be a whole number, 0 or more. {REMEDY}")
    assert len(problem) < 600
