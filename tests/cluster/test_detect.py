"""A rank that reads another place, host or meeting point from its launcher's variables is caught here alone."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.refusals import refused
from tests.support.present import present
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.launchers.slurm import node_names, tasks_per_node
from trainkit.cluster.local import LAUNCHERS, Local, detect
from trainkit.cluster.spec import Spec

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


def found(environ: Mapping[str, str], *, launcher: str = "auto") -> LaunchEnvironment:
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
    launch = found(environ)
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
    assert found(environ).store == store


def test_rank_0_opens_the_store_where_the_agent_has_none() -> None:
    own = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert found(own).hosts_store
    assert not found(own | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store
    assert not found(own | {"RANK": "2"}).hosts_store
    assert (found(HAND | {"RANK": "0"}).hosts_store, found(HAND).hosts_store) == (True, False)


def test_a_launch_has_the_name_and_the_attempt_of_its_launcher() -> None:
    assert (found(TORCHRUN).name, found(TORCHRUN).attempt) == ("job7", 1)
    assert found(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).name == "", "the id that all torchruns share"
    again = found(SLURM | {"SLURM_RESTART_COUNT": "2"})
    assert (again.name, again.attempt) == ("slurm-4711.0", 2)
    assert found(TORCHRUN).line() == (
        "launch by torchrun: rank 3 of 4 on 2 hosts, rendezvous at 10.0.0.1:29400 (TRAINKIT_LAUNCHER=none ignores it)"
    )


def test_addresses_are_known_where_ranks_fill_node_after_node() -> None:
    assert found(SLURM).addresses == ("n01", "n01", "n02", "n02", "n03")
    assert found(SLURM | {"SLURM_DISTRIBUTION": "cyclic"}).addresses == ()


def test_every_rank_of_a_step_derives_the_same_port_and_another_step_another() -> None:
    last = SLURM | {"SLURM_PROCID": "4", "SLURM_NODEID": "2"}
    assert found(last).store == found(SLURM).store != found(SLURM | {"SLURM_STEP_ID": "1"}).store
    of_mpi = [found(OPEN_MPI | {"PMIX_NAMESPACE": name}).store for name in ("123", "124")]
    assert of_mpi[0] != of_mpi[1]


def test_a_pod_that_starts_as_many_processes_as_it_has_gpus_takes_its_devices() -> None:
    assert (found(PET).takes_devices, found(PET | {"PET_NPROC_PER_NODE": "auto"}).takes_devices) == (False, True)


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
    assert facts(found(SLURM | {"SLURM_PTY_PORT": "40000"} | inside)) == (2, 5, 0, 2, 3)


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        (TORCHRUN | SLURM, "torchrun"),
        (TORCHRUN | PET, "torchrun"),
        (TORCHRUN | OPEN_MPI, "torchrun"),
        (HAND | PET, "RANK and WORLD_SIZE"),  # Kubeflow's PyTorchJob sets both
        (HAND | SLURM, "RANK and WORLD_SIZE"),
        (TF_CONFIG | SLURM, "TF_CONFIG"),
        (TF_CONFIG | OPEN_MPI, "TF_CONFIG"),
        (OPEN_MPI | SLURM, "Open MPI"),
        (MPICH | SLURM, "MPICH"),  # mpiexec in a job: SLURM's variables are those of its proxy
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "5"}, "SLURM"),  # srun --mpi=pmi2
        (SLURM | PET, "SLURM"),
        (SLURM | {"WORLD_SIZE": "5"}, "SLURM"),  # a batch script's own notes
    ],
)
def test_the_innermost_launcher_is_detected(environ: dict[str, str], kind: str) -> None:
    assert found(environ).kind == kind


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_can_be_named_or_ignored(name: str) -> None:
    everything = {key: value for environ in ALL.values() for key, value in environ.items()} | TORCHRUN
    asked = everything | {"TRAINKIT_LAUNCHER": name}
    assert found(asked).kind == found(everything, launcher=name).kind == found(ALL[name]).kind
    assert detect(everything | {"TRAINKIT_LAUNCHER": "none"}) is None


def test_the_config_outranks_the_environment() -> None:
    spec = Spec(worker=("a:1", "b:1"), task="worker:0")
    assert present(spec.launch(TORCHRUN | SLURM)).kind == "cluster=spec"
    assert present(Local(launcher="slurm").launch(TORCHRUN | SLURM | {"TRAINKIT_LAUNCHER": "none"})).kind == "SLURM"
    assert Local(launcher="none").launch(TORCHRUN) is None


def _forced() -> LaunchEnvironment | None:
    return Spec(worker=("a:1", "b:1"), task="worker:0").launch({"TRAINKIT_LAUNCHER": "slurm"})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: detect({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}),
         ["LOCAL_RANK: is not set", "LOCAL_WORLD_SIZE: is not set", "MASTER_ADDR: is not set", "MASTER_PORT: "]),
        (lambda: detect({"RANK": "1", "MASTER_PORT": "99999"}),
         ["WORLD_SIZE: is not set, though RANK is", "MASTER_ADDR: is not set", "MASTER_PORT=99999: must be a port"]),
        (lambda: detect({"WORLD_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "1"}), ["RANK: is not set"]),
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
def test_what_is_missing_or_contradicts_is_refused_all_at_once(call: Any, words: list[str]) -> None:
    problems = refused(call)
    assert len(problems) == len(words), problems
    for problem, start in zip(problems, words, strict=True):
        assert problem.startswith(start)


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


@pytest.mark.parametrize("text", ["n[1", "n]1", "n[a]", "n1,,n2"])
def test_what_is_no_list_of_nodes_is_refused_before_it_is_counted_out(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes: "):
        node_names(text)


@pytest.mark.parametrize("text", ["", "2x3"])
def test_what_is_no_list_of_counts_is_refused_before_it_is_counted_out(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of tasks per node: "):
        tasks_per_node(text)
