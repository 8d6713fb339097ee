"""Two tasks of one role at one address, or a task that no line starts, are caught here alone: lines are read back."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from trainkit.cli import main
from trainkit.cluster.spec import Spec
from trainkit.cluster.tf_config import read_tf_config

SERVERS = ("strategy=parameter_server", "strategy.workers=3", "strategy.servers=2", "strategy.evaluator=true")
TASKS = ["chief:0", "worker:0", "worker:1", "ps:0", "ps:1", "evaluator:0"]
POD_FLAGS = ("--image", "ghcr.io/me/trainkit:1", "--shared", "runs")


@pytest.fixture
def emit(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        assert main(["emit", *arguments]) == 0
        return capsys.readouterr().out

    return call


def commands(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield variables and words of each line that is to be run."""
    for line in text.splitlines():
        if not line.startswith("#"):
            words = shlex.split(line)
            variables = [word for word in words if re.match(r"[A-Z_]+=", word)]
            yield dict(word.split("=", 1) for word in variables), words[len(variables) :]


def tasks_read(variables: list[dict[str, str]]) -> list[str]:
    """Return the tasks that trainkit's reader finds; every process must read the same cluster."""
    found = [read_tf_config(one) for one in variables]
    assert all(one is not None for one in found)
    assert len({json.dumps(one.members) for one in found if one}) == 1
    return [f"{one.task[0]}:{one.task[1]}" for one in found if one]


def test_tf_config_is_read_by_every_task(emit: Callable[..., str]) -> None:
    found = [*commands(emit("tf_config", "--names", "a,b,c", "--port", "3000", *SERVERS))]
    assert tasks_read([variables for variables, _ in found]) == TASKS
    cluster = json.loads(found[0][0]["TF_CONFIG"])["cluster"]
    assert cluster == {
        "chief": ["a:3000"], "worker": ["a:3001", "b:3000"], "ps": ["b:3001", "c:3000"], "evaluator": ["c:3001"],
    }  # fmt: skip
    assert {tuple(words) for _, words in found} == {("python", "-m", "trainkit", *SERVERS)}


def test_workers_of_a_synchronous_run_are_a_task_a_process(emit: Callable[..., str]) -> None:
    text = emit("tf_config", "--names", "a,b", "--processes-per-host", "2", "strategy=multi_worker_mirrored")
    assert tasks_read([variables for variables, _ in commands(text)]) == [f"worker:{rank}" for rank in range(4)]
    assert "# worker:2 on b\n" in text


def test_spec_is_accepted_by_the_cluster_of_the_config(emit: Callable[..., str]) -> None:
    from trainkit.config.compose import compose
    from trainkit.config.targets.build import build

    launches = []
    for _, words in commands(emit("spec", "--names", "a,fd00::2", *SERVERS)):
        spec = build(compose(words[3:]).cfg.cluster, "cluster")
        assert isinstance(spec, Spec)
        launch = spec.launch({})
        assert launch is not None
        launches.append(launch.task)
    assert [str(task) for task in launches] == TASKS


@pytest.mark.slow
def test_kubernetes_gives_each_role_a_job_and_each_pod_its_task(emit: Callable[..., str]) -> None:
    from kubeflow_trainer_api.models import IoK8sApiBatchV1Job, IoK8sApiCoreV1Service

    text = emit("kubernetes", *POD_FLAGS, "--gpus-per-host", "1", "--time", "01:00:00", "--namespace", "me", *SERVERS)
    service, *jobs = yaml.safe_load_all(text)
    assert IoK8sApiCoreV1Service.from_dict(service).to_dict() == service  # what the API does not know is left out
    variables = []
    for job in jobs:
        assert IoK8sApiBatchV1Job.from_dict(job).to_dict() == job
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["subdomain"] == service["metadata"]["name"]
        assert job["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        assert ("resources" in container) == (job["metadata"]["name"].rpartition("-")[2] in ("chief", "worker"))
        value = container["env"][1]["value"]
        variables += [
            {"TF_CONFIG": value.replace("$(TASK_INDEX)", str(index))} for index in range(job["spec"]["completions"])
        ]
    assert tasks_read(variables) == TASKS
    addresses = json.loads(variables[0]["TF_CONFIG"])["cluster"]
    assert addresses["ps"] == ["digits-ps-0.digits:2222", "digits-ps-1.digits:2222"]


def test_vertex_has_a_pool_for_each_role(emit: Callable[..., str]) -> None:
    flags = [
        "--image",
        "i",
        "--machine",
        "m",
        "--shared",
        "10.0.0.2:/runs",
        "--gpus-per-host",
        "1",
        "--accelerator",
        "L4",
    ]
    pools = yaml.safe_load(emit("vertex", *flags, *SERVERS))["workerPoolSpecs"]
    assert [(pool["replicaCount"], "acceleratorType" in pool["machineSpec"]) for pool in pools] == [
        (1, True), (2, True), (2, False), (1, False),
    ]  # fmt: skip


def test_a_batch_script_gives_each_task_of_the_step_its_task(emit: Callable[..., str], cwd: Path) -> None:
    script = emit("slurm", "--hosts", "2", *SERVERS)
    assert "#SBATCH --ntasks-per-node=3\n" in script
    for name, text in {
        "scontrol": 'printf "n1\\nn2\\n"',
        # the step of SLURM: every task runs what follows the options, with its number
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\n'
        'for SLURM_PROCID in 0 1 2 3 4 5; do export SLURM_PROCID; "$@"; done',
        "python": 'echo "$TF_CONFIG"',
    }.items():
        (cwd / name).write_text(f"#!/bin/bash\n{text}\n")
        (cwd / name).chmod(0o755)
    variables = {"PATH": f"{cwd}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True)
    found = [{"TF_CONFIG": line} for line in done.stdout.splitlines()]
    assert tasks_read(found) == TASKS
    assert json.loads(found[0]["TF_CONFIG"])["cluster"] == {
        "chief": ["n1:20140"], "worker": ["n2:20140", "n1:20141"], "ps": ["n2:20141", "n1:20142"],
        "evaluator": ["n2:20142"],
    }  # fmt: skip


def test_mpirun_starts_a_rank_a_process(emit: Callable[..., str]) -> None:
    text = emit("mpirun", "--names", "a,b", "--processes-per-host", "2", "strategy=multi_worker_mirrored")
    assert text.splitlines()[-1] == (
        "exec mpirun -n 4 --bind-to none --host a:2,b:2 -x MASTER_ADDR=a "
        "python -m trainkit strategy=multi_worker_mirrored"
    )
    alone = emit("mpirun", "--processes-per-host", "2", "strategy=mirrored")
    assert alone.splitlines()[-1] == "exec mpirun -n 2 --bind-to none python -m trainkit strategy=mirrored"
    serving = emit("mpirun", "--processes-per-host", "3", "strategy=parameter_server")
    assert serving.splitlines()[-1] == "exec mpirun -n 3 --bind-to none python -m trainkit strategy=parameter_server"
