"""A script that starts too few processes, or splits an argument with a space or a dollar, is caught here alone.

The engine is stood in for by a command that prints its arguments.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.present import present
from tests.support.refusing import Refuse
from trainkit.cli import main
from trainkit.cluster.local import detect
from trainkit.cluster.manifests import ENGINES, ManifestJob
from trainkit.cluster.spec import Spec
from trainkit.cluster.tf_config import read_tf_config
from trainkit.config.compose import compose
from trainkit.config.targets.build import build

TWO_HOSTS = ("--hosts", "2", "--gpus-per-host", "4", "strategy=multi_worker_mirrored")
CONTAINER = ("--image", "ghcr.io/me/trainkit:1", "--shared", "10.0.0.2:/runs")
FLAGS = {
    "torchrun": ("--head", "n1"),
    "slurm": (),
    "kubernetes": ("--image", "ghcr.io/me/trainkit:1", "--shared", "runs"),
    "vertex": (*CONTAINER, "--machine", "g2-standard-48", "--accelerator", "NVIDIA_L4"),
    "skypilot": ("--accelerator", "A100", "--shared", "runs"),
    "mpirun": ("--names", "a,b"),
    "tf_config": ("--names", "a,b"),
    "spec": ("--names", "a,b"),
}
AWKWARD = ("name=a.b", "callbacks=[progress]", 'data.path="/my data/$(x) $HOME `y`"', "data=text_file")


@pytest.fixture
def emit(capsys: pytest.CaptureFixture[str], cwd: Path) -> Callable[..., str]:
    """Emit in an empty folder: return standard output; nothing else is printed or written."""

    def call(*arguments: str) -> str:
        assert main(["emit", *arguments]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        assert list(cwd.iterdir()) == []
        return printed.out

    return call


@pytest.fixture
def run(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a script whose engine is replaced by a command that prints its arguments, a line each."""

    def call(script: str, *arguments: str, **variables: str) -> list[str]:
        for name in ("torchrun", "srun", "mpirun", "python"):
            stand_in = cwd / "bin" / name
            stand_in.parent.mkdir(exist_ok=True)
            stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n')
            stand_in.chmod(0o755)
        path = f"{cwd / 'bin'}:/usr/bin:/bin"
        command = ["bash", "-c", script, "bash", *arguments]
        done = subprocess.run(command, env={"PATH": path, **variables}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        program, *rest = done.stdout.splitlines()
        return [program.rpartition("/")[2], *rest]

    return call


def test_a_torchrun_script_for_one_host_stands_alone(emit: Callable[..., str], run: Callable[..., list[str]]) -> None:
    script = emit("torchrun", "--processes-per-host", "2", "strategy=mirrored", "epochs=1")
    assert run(script) == [
        "torchrun", "--standalone", "--nproc-per-node=2", "-m", "trainkit", "strategy=mirrored", "epochs=1",
    ]  # fmt: skip


def test_a_torchrun_script_for_hosts_is_one_for_all(emit: Callable[..., str], run: Callable[..., list[str]]) -> None:
    flags = ("--head", "fd00::1", "--port", "3000", "--restarts", "3", "--min-hosts", "1", "--setup", "export A=1")
    script = emit("torchrun", *flags, *TWO_HOSTS)
    assert "\nexport A=1\n" in script
    assert run(script, "monday") == [
        "torchrun", "--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=[fd00::1]:3000", "--rdzv-id=monday",
        "--nproc-per-node=4", "--max-restarts=3", "-m", "trainkit", "strategy=multi_worker_mirrored",
    ]  # fmt: skip


def test_a_batch_script_starts_a_task_a_gpu(emit: Callable[..., str], run: Callable[..., list[str]]) -> None:
    flags = ("--time", "1-12:00:00", "--partition", "gpu", "--account", "me", "--cpus-per-process", "8")
    script = emit("slurm", *flags, *TWO_HOSTS)
    options = [line.partition("--")[2] for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "job-name=digits", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=8", "time=1-12:00:00",
        "partition=gpu", "account=me",
    ]  # fmt: skip
    assert run(script) == [
        "srun", "--kill-on-bad-exit=1", "--cpus-per-task=8", "python", "-m", "trainkit",
        "strategy=multi_worker_mirrored",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_train_job_gives_each_node_its_processes_and_the_shared_volume(emit: Callable[..., str]) -> None:
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    text = emit("kubernetes", *FLAGS["kubernetes"], "--namespace", "me", "--time", "01:00:00", *TWO_HOSTS)
    document = yaml.safe_load(text)
    assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document  # what it does not know it leaves out
    assert document["metadata"] == {"name": "digits", "namespace": "me"}
    spec = document["spec"]
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (2, 4)
    assert spec["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert spec["activeDeadlineSeconds"] == 3600


def test_a_custom_job_has_a_chief_and_workers_that_share_a_folder(emit: Callable[..., str]) -> None:
    pools = yaml.safe_load(
        emit("vertex", *FLAGS["vertex"], "--time", "01:00:00", "--hosts", "3", *TWO_HOSTS[2:], "batch.global_size=96")
    )
    chief, workers = pools["workerPoolSpecs"]
    assert (chief["replicaCount"], workers["replicaCount"]) == (1, 2)
    assert chief | {"replicaCount": 2} == workers
    assert chief["machineSpec"] == {
        "machineType": "g2-standard-48", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 4,
    }  # fmt: skip
    assert chief["nfsMounts"] == [{"server": "10.0.0.2", "path": "/runs", "mountPoint": "shared"}]
    assert pools["scheduling"] == {"timeout": "3600s"}


def test_a_task_of_skypilot_tells_torchrun_who_it_is(emit: Callable[..., str], run: Callable[..., list[str]]) -> None:
    task = yaml.safe_load(emit("skypilot", *FLAGS["skypilot"], *TWO_HOSTS))
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "A100:4"})
    node = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_TASK_ID": "sky-7",
    }  # fmt: skip
    assert run(task["run"], **node) == [
        "torchrun", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500", "--rdzv-id=sky-7",
        "--nproc-per-node=4", "-m", "trainkit", "strategy=multi_worker_mirrored",
    ]  # fmt: skip


def test_a_container_links_runs_to_a_volume(emit: Callable[..., str], run: Callable[..., list[str]], cwd: Path) -> None:
    job = yaml.safe_load(emit("kubernetes", *FLAGS["kubernetes"], *TWO_HOSTS))
    script, *arguments = [*job["spec"]["trainer"]["command"], *job["spec"]["trainer"]["args"]][2:]
    assert run(script, *arguments[1:]) == ["torchrun", "-m", "trainkit", "strategy=multi_worker_mirrored"]
    assert str((cwd / "outputs").readlink()) == "/shared"


@pytest.mark.parametrize("engine", ENGINES)
def test_arguments_arrive_as_they_are(engine: str, emit: Callable[..., str], run: Callable[..., list[str]]) -> None:
    text = emit(engine, *FLAGS[engine], *TWO_HOSTS, *AWKWARD)
    if engine in ("torchrun", "slurm", "mpirun"):
        arguments = run(text, "name")
    elif engine == "skypilot":
        arguments = run(yaml.safe_load(text)["run"], SKYPILOT_NODE_IPS="a", SKYPILOT_NUM_NODES="2",
                        SKYPILOT_NODE_RANK="0", SKYPILOT_TASK_ID="t")  # fmt: skip
    elif engine == "kubernetes":
        arguments = [argument.replace("$$(", "$(") for argument in yaml.safe_load(text)["spec"]["trainer"]["args"]]
    elif engine in ("tf_config", "spec"):
        command = shlex.split(text.splitlines()[-1])
        arguments = command[: command.index("cluster=spec")] if engine == "spec" else command
    else:
        arguments = yaml.safe_load(text)["workerPoolSpecs"][1]["containerSpec"]["args"]
    assert arguments[-4:] == list(AWKWARD)


def test_folders_and_packages_come_along(
    emit: Callable[..., str], cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cwd / "my conf").mkdir()
    assert main(["emit", "slurm", "--config-dir", "my conf", "--allow-package", "tests,benchmarks", "epochs=1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("-m trainkit --config-dir 'my conf' --allow-package tests,benchmarks epochs=1")


@pytest.mark.parametrize(("name", "label"), [("A_b.C", "a-b-c"), ("1x", "run-1x"), ("x" * 70, "x" * 63)])
def test_names_that_kubernetes_refuses_are_respelt(name: str, label: str) -> None:
    assert ManifestJob(name=name, arguments=(), hosts=1, per_host=1, gpus=False).label == label


def test_all_missing_or_refused_flags_of_an_engine_are_reported_together(refuse: Refuse) -> None:
    flags = ("--hosts", "2", "--gpus-per-host", "1", "--head", "n")
    keys = [problem.partition(": ")[0] for problem in refuse("emit", "vertex", *flags)]
    assert keys == [
        "--head=n", "--image", "--machine", "--accelerator", "--shared",
    ]  # fmt: skip


POD = ("kubernetes", "--image", "i", "--shared", "runs")
VERTEX = ("vertex", "--image", "i", "--machine", "m")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "emit: takes one of torchrun, slurm, kubernetes, vertex, skypilot, mpirun, tf_config, spec."),
        (("slrm",), "emit=slrm: no such engine. Did you mean slurm?"),
        (("slurm", "--time", "90"), "--time=90: must be [DAYS-]HH:MM:SS"),
        (("slurm", "--setup", "a\nb"), "--setup=a\\nb: must be one line"),
        (("slurm", "--gpus-per-host", "2", "--processes-per-host", "2"), "--processes-per-host=2: a host has"),
        ((*VERTEX, "--processes-per-host", "2"), "--processes-per-host=2: has no effect on vertex"),
        ((*VERTEX, "--shared", "server:runs"), "--shared=server:runs: must be SERVER:/PATH of NFS."),
        ((*POD[:4], "server:/runs"), "--shared=server:/runs: must be the name of a volume."),
        (("torchrun", "--hosts", "2"), "--head: is missing"),
        (("torchrun", "--hosts", "2", "--head", "n1", "--min-hosts", "1"), "--min-hosts=1: needs --restarts"),
        (("torchrun", "--hosts", "2", "--head", "n1", "--min-hosts", "3", "--restarts", "1"),
         "--min-hosts=3: must be --hosts=2 or less."),
        (("slurm", "cluster.launcher=none"), "cluster.launcher=none: the engine sets the tasks"),
        (("slurm", "--hosts", "2", "strategy=mirrored"), "strategy=mirrored: runs on one host, and SLURM started 2"),
        (("tf_config",), "--names: is missing"),
        (("spec", "--names", "a,a"), "--names=a,a: names a twice"),
        (("spec", "--names", "a,localhost"), "--names: 127.0.0.1:2222 is the local machine on every host: worker:1"),
        (("slurm", "--names", "a"), "--names=a: has no effect on slurm"),
        (("mpirun", "--processes-per-host", "2", "strategy=parameter_server", "strategy.servers=2"),
         "strategy=parameter_server: needs a chief and 2 to keep the variables, and Open MPI started 2"),
        ((*POD, "--hosts", "2", "strategy=parameter_server"), "--hosts=2: has no effect on kubernetes with parameter"),
        ((*VERTEX, "--shared", "s:/r", "strategy=parameter_server", "strategy.workers=1"), "strategy.workers=1: "),
        (("slurm", "--hosts", "4", "strategy=parameter_server"), "--hosts=4: are more than the 3 tasks"),
        (("slurm", "--processes-per-host", "2", "strategy=parameter_server"), "--processes-per-host=2: has no effect"),
    ],
)  # fmt: skip
def test_what_could_not_run_is_refused(arguments: tuple[str, ...], problem: str, refuse: Refuse) -> None:
    (message,) = refuse("emit", *arguments)
    assert message.startswith(problem)


SERVERS = ("strategy=parameter_server", "strategy.workers=3", "strategy.servers=2", "strategy.evaluator=true")
TASKS = ["chief:0", "worker:0", "worker:1", "ps:0", "ps:1", "evaluator:0"]
POD_FLAGS = ("--image", "ghcr.io/me/trainkit:1", "--shared", "runs")


def commands(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield variables and words of each line that is to be run."""
    for line in text.splitlines():
        if not line.startswith("#"):
            command = shlex.split(line)
            variables = [word for word in command if re.match(r"[A-Z_]+=", word)]
            yield dict(word.split("=", 1) for word in variables), command[len(variables) :]


def tasks_read(variables: list[dict[str, str]]) -> list[str]:
    """Return the tasks that trainkit's reader finds; every process must read the same cluster."""
    configs = [present(read_tf_config(variable)) for variable in variables]
    assert len({json.dumps(config.members) for config in configs}) == 1
    return [f"{config.task[0]}:{config.task[1]}" for config in configs]


def test_tf_config_is_read_by_every_task(emit: Callable[..., str]) -> None:
    lines = [*commands(emit("tf_config", "--names", "a,b,c", "--port", "3000", *SERVERS))]
    assert tasks_read([variables for variables, _ in lines]) == TASKS
    cluster = json.loads(lines[0][0]["TF_CONFIG"])["cluster"]
    assert cluster == {
        "chief": ["a:3000"], "worker": ["a:3001", "b:3000"], "ps": ["b:3001", "c:3000"], "evaluator": ["c:3001"],
    }  # fmt: skip
    assert {tuple(command) for _, command in lines} == {("python", "-m", "trainkit", *SERVERS)}


def test_workers_of_a_synchronous_run_are_a_task_a_process(emit: Callable[..., str]) -> None:
    text = emit("tf_config", "--names", "a,b", "--processes-per-host", "2", "strategy=multi_worker_mirrored")
    assert tasks_read([variables for variables, _ in commands(text)]) == [f"worker:{rank}" for rank in range(4)]
    assert "# worker:2 on b\n" in text


def test_spec_is_accepted_by_the_cluster_of_the_config(emit: Callable[..., str]) -> None:
    tasks = []
    for _, command in commands(emit("spec", "--names", "a,fd00::2", *SERVERS)):
        spec: Spec = build(compose(command[3:]).cfg.cluster, "cluster")
        tasks.append(str(present(spec.launch({})).task))
    assert tasks == TASKS


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
    pools = yaml.safe_load(emit("vertex", *FLAGS["vertex"], "--gpus-per-host", "1", *SERVERS))["workerPoolSpecs"]
    assert [(pool["replicaCount"], "acceleratorType" in pool["machineSpec"]) for pool in pools] == [
        (1, True), (2, True), (2, False), (1, False),
    ]  # fmt: skip


def test_a_batch_script_gives_each_task_of_the_step_its_task(emit: Callable[..., str], cwd: Path) -> None:
    script = emit("slurm", "--hosts", "2", *SERVERS)
    assert "#SBATCH --ntasks-per-node=3\n" in script
    (cwd / "srun").write_text('#!/bin/bash\necho "$TRAINKIT_TASKS" "$@"\n')
    (cwd / "srun").chmod(0o755)
    variables = {"PATH": f"{cwd}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True)
    tasks, flags = done.stdout.split()[:6], done.stdout.split()[6:9]
    assert (tasks, flags) == (TASKS, ["--kill-on-bad-exit=1", "--ntasks=6", "--distribution=cyclic"])
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "3(x2)", "TRAINKIT_TASKS": " ".join(tasks), "MASTER_PORT": "3000",
    }  # fmt: skip
    addresses = []
    for rank in range(6):
        position = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank // 2), "SLURM_NODEID": str(rank % 2)}
        launch = present(detect({**step, **position}))
        assert (launch.rank, launch.local_rank, launch.num_local, launch.store) == (rank, rank // 2, 3, ("n1", 3000))
        addresses.append((str(launch.task), launch.addresses[rank]))
    assert addresses == [*zip(TASKS, ["n1:3000", "n2:3000", "n1:3001", "n2:3001", "n1:3002", "n2:3002"], strict=True)]


def test_mpirun_starts_a_rank_a_process(emit: Callable[..., str]) -> None:
    over = ("--names", "a,b", "--processes-per-host", "2", "strategy=multi_worker_mirrored")
    for flags, line in (
        (
            over,
            "exec mpirun -n 4 --bind-to none --host a:2,b:2 -x MASTER_ADDR=a python -m trainkit strategy=multi_worke",
        ),
        (("--processes-per-host", "3", "strategy=parameter_server"), "exec mpirun -n 3 --bind-to none python -m train"),
    ):
        assert emit("mpirun", *flags).splitlines()[-1].startswith(line)
