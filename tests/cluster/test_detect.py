"""A rank that reads another place, host or meeting point from its launcher's variables is caught here alone.
A variable with a billion ranks, or a number of thousands of digits, that is counted out is caught here alone.
A cluster written by hand whose tasks get other ranks in one process than in another is caught here alone.

The same rules hold for `cluster=spec` and for TF_CONFIG.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.present import present
from tests.support.refusing import refused
from trainkit.cluster.address import Address
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.launchers import node_names, tasks_per_node
from trainkit.cluster.local import LAUNCHERS, Local, detect
from trainkit.cluster.spec import Spec
from trainkit.cluster.tasks import Identity, Task
from trainkit.cluster.tf_config import read_tf_config
from trainkit.errors import ConfigError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip
ALONE = TORCHRUN | {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1",
}  # fmt: skip
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2222"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_DISTRIBUTION": "block",
}  # fmt: skip
ONE_NODE = SLURM | {"SLURM_STEP_NODELIST": "n01", "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
OVER_HOSTS = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_NPROC_PER_NODE": "1"}
TF_CONFIG = {
    "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})
}  # fmt: skip
ALL = {
    "torchrun": TORCHRUN, "environment": HAND, "tf_config": TF_CONFIG, "openmpi": OPEN_MPI, "mpich": MPICH,
    "slurm": SLURM, "pet": PET,
}  # fmt: skip


def detected(environ: Mapping[str, str], *, launcher: str = "auto") -> LaunchEnvironment:
    return present(detect(environ, launcher=launcher))


def facts(launch: LaunchEnvironment) -> tuple[int, int, int, int, int]:
    return (launch.rank, launch.num_ranks, launch.local_rank, launch.num_local, launch.num_hosts)


@pytest.mark.parametrize(
    ("environ", "kind", "expected"),
    [
        (TORCHRUN, "torchrun", (3, 4, 1, 2, 2)),
        (ALONE, "torchrun", (0, 1, 0, 1, 1)),  # it may have had more members, and regain them
        (HAND, "RANK and WORLD_SIZE", (1, 2, 0, 1, 2)),
        (HAND | {"MASTER_ADDR": "localhost"}, "RANK and WORLD_SIZE", (1, 2, 1, 2, 1)),
        (HAND | {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "RANK and WORLD_SIZE",
         (1, 4, 1, 2, 2)),
        (SLURM, "SLURM", (2, 5, 0, 2, 3)),
        (SLURM | {"SLURM_PROCID": "4", "SLURM_NODEID": "2"}, "SLURM", (4, 5, 0, 1, 3)),
        (ONE_NODE, "SLURM", (2, 5, 0, 5, 1)),
        (OPEN_MPI, "Open MPI", (1, 2, 1, 2, 1)),
        (OVER_HOSTS | {"MASTER_ADDR": "n1"}, "Open MPI", (1, 2, 0, 1, 2)),
        (MPICH, "MPICH", (1, 2, 1, 2, 1)),
        (PET, "PET_NNODES", (1, 2, 0, 1, 2)),
    ],
)  # fmt: skip
def test_ranks_and_places_are_those_of_the_launcher(
    environ: dict[str, str], kind: str, expected: tuple[int, ...]
) -> None:
    launch = detected(environ)
    assert (launch.kind, facts(launch)) == (kind, expected)


@pytest.mark.parametrize(
    ("environ", "store"),
    [
        (TORCHRUN, ("10.0.0.1", 29400)),
        (HAND, ("10.0.0.1", 2222)),
        (SLURM, ("n01", 24569)),
        (SLURM | {"MASTER_ADDR": "n02.ib", "MASTER_PORT": "12345"}, ("n02.ib", 12345)),
        (ONE_NODE | {"MASTER_PORT": "12345"}, ("127.0.0.1", 12345)),
        (OPEN_MPI | {"MASTER_PORT": "1"}, ("127.0.0.1", 1)),
        (OVER_HOSTS | {"OMPI_MCA_orte_hnp_uri": "42.0;tcp://10.0.0.7,172.17.0.1:45321", "MASTER_PORT": "1"},
         ("10.0.0.7", 1)),
        (OVER_HOSTS | {"OMPI_MCA_orte_hnp_uri": "42.0;tcp6://[fd00::7]:45321", "MASTER_PORT": "1"}, ("fd00::7", 1)),
        (PET, ("job-node-0-0.job", 29500)),
        (PET | {"PET_NNODES": "2:2", "PET_MASTER_PORT": "3"}, ("job-node-0-0.job", 3)),
    ],
)  # fmt: skip
def test_ranks_meet_where_the_launcher_says(environ: dict[str, str], store: tuple[str, int]) -> None:
    assert detected(environ).store == store


def test_rank_0_opens_the_store_where_the_agent_has_none() -> None:
    environ = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert detected(environ).hosts_store
    assert not detected(environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store
    assert not detected(environ | {"RANK": "2"}).hosts_store
    assert (detected(HAND | {"RANK": "0"}).hosts_store, detected(HAND).hosts_store) == (True, False)


def test_a_launch_has_the_name_and_the_attempt_of_its_launcher() -> None:
    assert (detected(TORCHRUN).name, detected(TORCHRUN).attempt) == ("job7", 1)
    assert detected(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).name == "", "the id that all torchruns share"
    again = detected(SLURM | {"SLURM_RESTART_COUNT": "2"})
    assert (again.name, again.attempt) == ("slurm-4711.0", 2)
    assert detected(TORCHRUN).line() == (
        "launch by torchrun: rank 3 of 4 on 2 hosts, rendezvous at 10.0.0.1:29400 (TRAINKIT_LAUNCHER=none ignores it)"
    )


def test_addresses_are_known_where_ranks_fill_node_after_node() -> None:
    assert detected(SLURM).addresses == ("n01", "n01", "n02", "n02", "n03")
    assert detected(SLURM | {"SLURM_DISTRIBUTION": "cyclic"}).addresses == ()


def test_every_rank_of_a_step_derives_the_same_port_and_another_step_another() -> None:
    last = SLURM | {"SLURM_PROCID": "4", "SLURM_NODEID": "2"}
    assert detected(last).store == detected(SLURM).store != detected(SLURM | {"SLURM_STEP_ID": "1"}).store
    of_mpi = [detected(OPEN_MPI | {"PMIX_NAMESPACE": name}).store for name in ("123", "124")]
    assert of_mpi[0] != of_mpi[1]


def test_a_pod_that_starts_as_many_processes_as_it_has_gpus_takes_its_devices() -> None:
    assert (detected(PET).takes_devices, detected(PET | {"PET_NPROC_PER_NODE": "auto"}).takes_devices) == (False, True)


@pytest.mark.parametrize(
    "outside",
    [
        {"PATH": "/bin", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "LOCAL_RANK": "0"},
        ALONE | {"TORCHELASTIC_MAX_RESTARTS": "0"},
        HAND | {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},  # sbatch's script
        SLURM | {"SLURM_STEP_ID": "4294967291"},  # the same, of a SLURM that numbers it
        SLURM | {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        SLURM | {"SLURM_PTY_PORT": "40000", "SLURM_JOB_NAME": "bash"},  # the shell of srun --pty
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun of one task
    ],
)
def test_what_has_one_process_is_no_launch(outside: dict[str, str]) -> None:
    assert detect(outside) is None


@pytest.mark.parametrize(
    "inside", [{"SLURM_STEP_ID": "1", "SLURM_JOB_NAME": "bash"}, {"SLURM_JOB_NAME": "train.sbatch"}]
)
def test_a_step_started_from_the_shell_of_a_step_is_one(inside: dict[str, str]) -> None:
    assert facts(detected(SLURM | {"SLURM_PTY_PORT": "40000"} | inside)) == (2, 5, 0, 2, 3)


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        (TORCHRUN | SLURM, "torchrun"),
        (TORCHRUN | PET, "torchrun"),
        (HAND | PET, "RANK and WORLD_SIZE"),  # Kubeflow's PyTorchJob sets both
        (TF_CONFIG | SLURM, "TF_CONFIG"),
        (OPEN_MPI | SLURM, "Open MPI"),
        (MPICH | SLURM, "MPICH"),  # mpiexec in a job: SLURM's variables are those of its proxy
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "5"}, "SLURM"),  # srun --mpi=pmi2
        (SLURM | PET, "SLURM"),
        (SLURM | {"WORLD_SIZE": "5"}, "SLURM"),  # a batch script's own notes
    ],
)
def test_the_innermost_launcher_is_detected(environ: dict[str, str], kind: str) -> None:
    assert detected(environ).kind == kind


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_can_be_named_or_ignored(name: str) -> None:
    everything = {key: value for environ in ALL.values() for key, value in environ.items()} | TORCHRUN
    chosen = everything | {"TRAINKIT_LAUNCHER": name}
    assert detected(chosen).kind == detected(everything, launcher=name).kind == detected(ALL[name]).kind
    assert detect(everything | {"TRAINKIT_LAUNCHER": "none"}) is None


def test_the_config_outranks_the_environment() -> None:
    assert present(Spec(worker=("a:1", "b:1"), task="worker:0").launch(TORCHRUN | SLURM)).kind == "cluster=spec"
    assert present(Local(launcher="slurm").launch(TORCHRUN | SLURM | {"TRAINKIT_LAUNCHER": "none"})).kind == "SLURM"
    assert Local(launcher="none").launch(TORCHRUN) is None


def _forced() -> LaunchEnvironment | None:
    return Spec(worker=("a:1", "b:1"), task="worker:0").launch({"TRAINKIT_LAUNCHER": "slurm"})


@pytest.mark.parametrize(
    ("call", "starts"),
    [
        (lambda: detect({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}),
         ["LOCAL_RANK: is not set", "LOCAL_WORLD_SIZE: is not set", "MASTER_ADDR: is not set", "MASTER_PORT: "]),
        (lambda: detect({"RANK": "1", "MASTER_PORT": "99999"}),
         ["WORLD_SIZE: is not set, though RANK is", "MASTER_ADDR: is not set", "MASTER_PORT=99999: must be a port"]),
        (lambda: detect({"WORLD_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "1"}), ["RANK: is not set"]),
        (lambda: detect(HAND | {"RANK": "²"}), ["RANK=²: must be a whole number, 0 or more. Correct it, or ignore"]),
        (lambda: detect(HAND | {"LOCAL_WORLD_SIZE": "9"}), ["LOCAL_WORLD_SIZE=9: must be WORLD_SIZE=2 or less"]),
        (lambda: detect(SLURM | {"SLURM_LOCALID": "7"}), ["SLURM_LOCALID=7: must be less than the 2 tasks of its"]),
        (lambda: detect(SLURM | {"SLURM_PROCID": "5", "SLURM_STEP_NODELIST": "n[1", "SLURM_JOB_ID": ""}),
         ["SLURM_PROCID=5: must be less than", "SLURM_STEP_NODELIST: is not a list", "SLURM_JOB_ID: is not set"]),
        (lambda: detect(OVER_HOSTS), ["MASTER_ADDR: is not set, though OMPI_COMM_WORLD_SIZE is"]),
        (lambda: detect({"PMI_SIZE": "2"}), ["PMI_RANK: ", "MPI_LOCALRANKID: ", "MPI_LOCALNRANKS: ", "MASTER_ADDR: "]),
        (lambda: detect(PET | {"PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "4"}),
         ["PET_NNODES=1:2: is a range", "PET_NPROC_PER_NODE=4: is several processes"]),
        (lambda: detect({"PET_NNODES": "2"}), ["PET_NODE_RANK: is not set", "PET_MASTER_ADDR: is not set"]),
        (lambda: detect({"TRAINKIT_LAUNCHER": "slrum"}), ["TRAINKIT_LAUNCHER=slrum: no such launcher. Did you "]),
        (lambda: detect({}, launcher="slurm"), ["cluster.launcher=slurm: this process was not started by it"]),
        (_forced, ["TRAINKIT_LAUNCHER=slurm: has no effect: cluster=spec"]),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_refused_all_at_once(call: Any, starts: list[str]) -> None:
    problems = refused(call)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start)


def test_a_package_reads_the_variables_of_its_own_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine-1.dist-info").mkdir()
    (tmp_path / "mine-1.dist-info/entry_points.txt").write_text("[trainkit.launchers]\nmine = mine_launching:read\n")
    (tmp_path / "mine_launching.py").write_text(
        "from trainkit.cluster.local import detect\n"
        "def read(environ):\n"
        "    names = {'MY_RANK': 'RANK', 'MY_SIZE': 'WORLD_SIZE', 'MY_HOST': 'MASTER_ADDR', 'MY_PORT': 'MASTER_PORT'}\n"
        "    return detect({names.get(name, name): value for name, value in environ.items()}, launcher='environment')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    environ = {"MY_RANK": "1", "MY_SIZE": "2", "MY_HOST": "10.0.0.1", "MY_PORT": "2222"}
    assert present(detect(environ, launcher="mine")).rank == 1
    assert present(Local(launcher="mine").launch(environ)).num_ranks == 2
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("gpu-a[1-2],login,gpu-b[5]x", ["gpu-a1", "gpu-a2", "login", "gpu-b5x"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
    ],
)
def test_brackets_expand_in_order_and_keep_leading_zeros(text: str, names: list[str]) -> None:
    assert node_names(text) == names
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


FOUR: dict[str, Any] = {"chief": "a:1", "worker": ("b:1", "b:2"), "evaluator": ("c:1",)}
TWO: dict[str, Any] = {"worker": ("a:1", "b:1")}
SECOND = {"type": "worker", "index": 1}


def environ(content: object, variable: str = "TF_CONFIG") -> dict[str, str]:
    return {variable: content if isinstance(content, str) else json.dumps(content)}


def test_ranks_follow_the_roles_and_the_chief_is_first() -> None:
    launch = present(Spec(**FOUR, task="worker:1").launch({}))
    assert [str(task) for task in launch.tasks] == ["chief:0", "worker:0", "worker:1", "evaluator:0"]
    assert (launch.rank, launch.store, launch.hosts_store) == (2, ("a", 1), False)
    assert (launch.local_rank, launch.num_local, launch.num_hosts, launch.takes_devices) == (1, 2, 3, True)
    assert launch.place_of(1) == "worker:0 (b:1)"
    assert launch.line() == "launch by cluster=spec: rank 2 (worker:1) of 4 on 3 hosts, rendezvous at a:1"


def test_an_evaluator_counts_neither_as_a_rank_nor_as_a_host_of_the_training() -> None:
    cluster = {"worker": ("a:1", "b:1", "b:2"), "evaluator": ("c:1",)}
    launch = present(Spec(**cluster, task="worker:2").launch({})).training
    assert (launch.rank, launch.num_ranks) == (2, 3)
    assert (launch.local_rank, launch.num_local, launch.num_hosts) == (1, 2, 2)


def test_without_a_chief_worker_0_has_rank_0_and_opens_the_store() -> None:
    launch = present(Spec(**TWO, task="worker:0").launch({}))
    assert (launch.rank, launch.hosts_store, str(launch.task)) == (0, True, "worker:0")


def test_a_cluster_of_one_task_and_an_empty_variable_are_no_launch() -> None:
    assert Spec(worker=("a:1",)).launch({}) is None
    assert detect(environ({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}})) is None
    assert detect({"TF_CONFIG": ""}) is None


def test_tf_config_is_a_launch_whatever_else_a_cloud_writes_into_it() -> None:
    cluster = {"chief": "a:1", "worker": ["b:1", "c:1"], "ps": []}
    task = {"type": "worker", "index": "1", "trial": "", "cloud": "x"}
    content = {"cluster": cluster, "task": task, "environment": "cloud", "job": "{}"}
    assert present(read_tf_config(environ(content))).members == {"chief": ("a:1",), "worker": ("b:1", "c:1")}
    launch = present(detect(environ(content)))
    assert (launch.kind, launch.rank, str(launch.task), launch.num_ranks) == ("TF_CONFIG", 2, "worker:1", 3)


def test_vertex_says_worker_pools_where_it_sets_no_tf_config() -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]}
    content = {"cluster": pools, "task": {"type": "workerpool1", "index": 1}}
    launch = present(detect(environ(content, "CLUSTER_SPEC")))
    assert (launch.kind, launch.rank, str(launch.task)) == ("CLUSTER_SPEC", 2, "worker:1")
    variables = environ(content, "CLUSTER_SPEC") | environ({"cluster": TWO, "task": SECOND})
    assert present(detect(variables)).kind == "TF_CONFIG"


def test_the_task_of_a_spec_may_come_from_tf_config_which_must_name_the_same_cluster() -> None:
    assert present(Spec(**TWO).launch(environ({"cluster": TWO, "task": SECOND}))).rank == 1
    other = environ({"cluster": {"worker": ["a:1", "c:1"], "ps": ["d:1"]}, "task": SECOND})
    spec = Spec(**TWO, task="worker:0")
    keys = [problem.partition(": ")[0] for problem in refused(spec.launch, other)]
    assert keys == ["TF_CONFIG.cluster.worker", "TF_CONFIG.cluster.ps", "TF_CONFIG.task"]
    assert present(spec.launch(other | {"TRAINKIT_LAUNCHER": "none"})).rank == 0


UNKNOWN = "no such role. There are: chief, worker, ps, evaluator."


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "cluster: names no task. It needs at least one worker"),
        ({"ps": ("a:1",)}, "cluster: has neither chief nor worker"),
        ({"worker": ("a:1", "A:1")}, "cluster.worker=A:1: is also the address of worker:0. Every task needs its own."),
        ({"chief": ("a:1", "b:1")}, "cluster.chief=[a:1, b:1]: a cluster has one chief, and 2 are given. "),
        ({"chief": "a:1", "evaluator": ("b:1", "c:1")}, "cluster.evaluator=[b:1, c:1]: a cluster has one evaluator"),
        ({"worker": ("a:70000",)}, "cluster.worker=a:70000: its port must be a number from 1 to 65535."),
        ({"worker": ("127.0.0.1:1", "b:1")}, "cluster: 127.0.0.1:1 is the local machine on every host: worker:0 needs"),
        ({"worker": ("a:1",), "task": "worker:-1"}, "cluster.task=worker:-1: must be ROLE:INDEX"),
        ({**TWO, "task": "worker:2"}, "cluster.task=worker:2: the cluster has 2 workers, worker:0 to worker:1."),
        ({**TWO, "task": "wroker:1"}, "cluster.task=wroker:1: no such role. Did you mean worker? "),
        ({**TWO, "task": "chief:0"}, "cluster.task=chief:0: the cluster has no chief. Without one, worker:0 acts as"),
    ],
)
def test_a_bad_cluster_is_refused_by_its_key(keys: dict[str, Any], problem: str) -> None:
    (message,) = refused(Spec, **keys)
    assert message.startswith(problem)


def test_all_problems_of_a_cluster_and_a_missing_task_are_named() -> None:
    problems = refused(Spec, chief=("a:1", "b:1"), worker=("a:1", "c"), ps=("d:0",), task="ps:1")
    assert [problem.partition(": ")[0] for problem in problems] == [
        "cluster.chief=[a:1, b:1]", "cluster.worker=a:1", "cluster.worker=c", "cluster.ps=d:0", "cluster.task=ps:1",
    ]  # fmt: skip
    (missing,) = refused(Spec(**TWO).launch, {})
    assert missing.startswith("cluster.task: is missing")
    assert missing.endswith("Give cluster.task=ROLE:INDEX, of worker:0, worker:1.")


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        ("{", ["TF_CONFIG: cannot be read: it is not JSON"]),
        ("[" * 5000, ["TF_CONFIG: cannot be read: its JSON is nested deeper than 64"]),
        ("3", ["TF_CONFIG: must be a JSON object"]),
        ("{}", ["TF_CONFIG.cluster: is missing", "TF_CONFIG.task: is missing"]),
        ({"clutser": TWO, "cluster": TWO, "task": {"type": "worker", "index": 0, "indx": 1}},
         ["TF_CONFIG.clutser: no such key. Did you mean cluster?", "TF_CONFIG.task.indx: no such key. Did you "]),
        ({"cluster": {"workers": ["a:1"]}, "task": ["worker", 0]},
         ["TF_CONFIG.cluster.workers: no such role. Did you mean worker? ", "TF_CONFIG.task: must be an object"]),
        ({"cluster": ["a:1"], "task": SECOND}, ["TF_CONFIG.cluster: must be an object"]),
        ({"cluster": {"worker": [1]}, "task": SECOND}, ["TF_CONFIG.cluster.worker: must be a list of HOST:PORT"]),
        ({"cluster": {}, "task": SECOND}, ["TF_CONFIG.cluster: names no task"]),
        ({"cluster": {"worker": ["a:1", "b:99999"], "master": ["b:1"]}, "task": {"type": "worker"}},
         ["TF_CONFIG.cluster.worker=b:99999: its port", f"TF_CONFIG.cluster.master: {UNKNOWN}",
          "TF_CONFIG.task.index: is missing"]),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "boss", "index": True}},
         ["TF_CONFIG.cluster.chief=[a:1, b:1]", f"TF_CONFIG.task.type=boss: {UNKNOWN}", "TF_CONFIG.task.index=true"]),
        ({"cluster": TWO, "task": {"type": "worker", "index": 2}}, ["TF_CONFIG.task=worker:2: the cluster has 2 work"]),
        ({"cluster": TWO, "task": {"index": 0}}, ["TF_CONFIG.task.type: is missing"]),
    ],
)  # fmt: skip
def test_a_bad_tf_config_is_refused_by_its_key(content: object, problems: list[str]) -> None:
    lines = refused(detect, environ(content))
    assert all(line.startswith(start) for line, start in zip(lines, problems, strict=True)), lines


@pytest.mark.parametrize("text", ["node-7.cluster.local:65535", "[::1]:1", "[fe80::1%eth0]:29400"])
def test_an_address_is_read_and_written_back(text: str) -> None:
    host, _, port = text.rpartition(":")
    assert Address.parse(text) == (host.strip("[]"), int(port))
    assert str(Address.parse(text)) == text


def test_what_is_no_address_names_the_rule() -> None:
    rules = {
        "node7": "has no port", ":2222": "has no host", "::1:2222": "an IPv6 address needs brackets",
        "node7:": "its port must be", "node7:0": "its port must be", "node7:65536": "its port must be",
        "node 7:1": "its host must be", "[node7]:1": "its host must be",
    }  # fmt: skip
    for text, rule in rules.items():
        with pytest.raises(ValueError, match=rule):
            Address.parse(text)


def test_an_identity_survives_the_environment() -> None:
    task = Task(role="ps", index=1, rank=3, device="cuda:1")
    identity = Identity(task=task, num_ranks=4, store=("::1", 29400), prefix="attempt/2", attempt=2, life=1, token="t0")
    assert Identity.from_environ(identity.to_environ()) == identity
    assert Identity.from_environ({"PATH": "/bin"}) == Identity.solo("cpu")


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"TRAINKIT_RANK": "one"}, "TRAINKIT_RANK=one: must be a whole number, 0 or more."),
        ({"TRAINKIT_RANK": "0", "TRAINKIT_STORE": "localhost"}, "TRAINKIT_STORE=localhost: must be HOST:PORT"),
        ({"TRAINKIT_RANK": "2", "TRAINKIT_RANKS": "2"}, "TRAINKIT_RANK=2: ranks go from 0 to TRAINKIT_RANKS - 1 = 1."),
    ],
)
def test_a_bad_variable_of_an_identity_is_named(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Identity.from_environ(variables)
