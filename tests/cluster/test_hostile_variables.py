"""A variable with a billion ranks, or a number of thousands of digits, that is counted out is caught here alone."""

import pytest

from tests.cluster.refusals import refused
from trainkit.cluster.local import detect

HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
STEP = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
WHOLE = "must be a whole number, 0 or more. Correct it, or ignore the launch: TRAINKIT_LAUNCHER=none. (environment)"


@pytest.mark.parametrize(
    ("environ", "name", "value", "rule"),
    [
        (HAND, "RANK", "x", WHOLE),
        (HAND, "RANK", "²", WHOLE),
        (HAND, "RANK", "2", "must be less than WORLD_SIZE=2"),
        (HAND, "WORLD_SIZE", "1000000000", "must be 100,000 or less"),
        (HAND, "LOCAL_WORLD_SIZE", "9", "must be WORLD_SIZE=2 or less"),
        (HAND, "MASTER_PORT", "70000", "must be a port, 65535 at most"),
        (HAND, "MASTER_ADDR", "a b", "must be the name or address of a host"),
        (STEP, "SLURM_LOCALID", "7", "must be less than the 1 tasks of its node"),
        ({}, "PET_NNODES", "x", "must be a whole number, 1 or more"),
    ],
)
def test_a_malformed_variable_is_refused(environ: dict[str, str], name: str, value: str, rule: str) -> None:
    (problem,) = refused(lambda: detect({**environ, name: value}))
    assert problem.startswith(name)
    assert rule in problem


@pytest.mark.parametrize(("environ", "name"), [(HAND, "RANK"), (STEP, "SLURM_PROCID")])
def test_a_number_of_thousands_of_digits_is_no_number(environ: dict[str, str], name: str) -> None:
    (problem,) = refused(lambda: detect({**environ, name: "1" * 5000}))
    assert problem.startswith(f"{name}=111")
    assert len(problem) < 600
