import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.cluster.refusals import refused
from tests.support.present import present
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.local import LAUNCHERS, Local, detect
from trainkit.cluster.spec import Spec

REMEDY = "Correct it, or ignore the launch: TRAINKIT_LAUNCHER=none."
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2222"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_DISTRIBUTION": "block",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
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


def test_an_empty_environment_is_no_launch() -> None:
    assert detect({"PATH": "/bin", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}) is None


# torchrun


def test_all_facts_of_a_launch_are_read_from_the_variables_of_torchrun() -> None:
    launch = found(TORCHRUN)
    assert (launch.kind, facts(launch)) == ("torchrun", (3, 4, 1, 2, 2))
    assert (launch.store, launch.hosts_store, launch.attempt, launch.name) == (("10.0.0.1", 29400), False, 1, "job7")
    assert launch.line() == (
        "launch by torchrun: rank 3 of 4 on 2 hosts, rendezvous at 10.0.0.1:29400 (TRAINKIT_LAUNCHER=none ignores it)"
    )


def test_rank_0_opens_the_store_where_the_agent_has_none() -> None:
    own = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert found(own).hosts_store
    assert not found(own | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store
    assert not found(own | {"RANK": "2"}).hosts_store


def test_the_run_id_that_all_torchruns_share_names_none() -> None:
    assert found(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).name == ""


def test_torchrun_with_one_process_is_a_launch_only_while_it_may_restart() -> None:
    alone = TORCHRUN | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "1",
    }
    assert facts(found(alone)) == (0, 1, 0, 1, 1)
    assert detect(alone | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None


def test_half_of_torchruns_variables_are_refused_by_name() -> None:
    half = {"TORCHELASTIC_RUN_ID": "x", "RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "one", "LOCAL_WORLD_SIZE": "2"}
    hint = "is not set, though TORCHELASTIC_RUN_ID is. Set it, or ignore the launch: TRAINKIT_LAUNCHER=none."
    assert refused(lambda: detect(half)) == [
        f"RANK=4: must be less than WORLD_SIZE=4. {REMEDY} (environment)",
        f"LOCAL_RANK=one: must be a whole number, 0 or more. {REMEDY} (environment)",
        f"MASTER_ADDR: {hint} (environment)",
        f"MASTER_PORT: {hint} (environment)",
    ]


# by hand


def test_four_variables_set_by_hand_are_a_launch() -> None:
    launch = found(HAND)
    assert (launch.kind, facts(launch), launch.store) == ("RANK and WORLD_SIZE", (1, 2, 0, 1, 2), ("10.0.0.1", 2222))
    assert found(HAND | {"RANK": "0"}).hosts_store


def test_ranks_that_meet_at_a_loopback_address_share_a_host() -> None:
    assert facts(found(HAND | {"MASTER_ADDR": "localhost"})) == (1, 2, 1, 2, 1)
    assert facts(found(HAND | {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})) == (1, 4, 1, 2, 2)


def test_half_of_the_four_is_refused_by_name() -> None:
    hint = "is not set, though RANK is. Set it, or ignore the launch: TRAINKIT_LAUNCHER=none. (environment)"
    assert refused(lambda: detect({"RANK": "1", "MASTER_PORT": "99999"})) == [
        f"WORLD_SIZE: {hint}",
        f"MASTER_ADDR: {hint}",
        f"MASTER_PORT=99999: must be a port, 65535 at most. {REMEDY} (environment)",
    ]
    assert refused(lambda: detect({"WORLD_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "1"})) == [
        hint.replace("is not", "RANK: is not").replace("RANK is.", "WORLD_SIZE is.")
    ]


def test_a_world_of_one_is_no_launch() -> None:
    assert detect(HAND | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert detect({"WORLD_SIZE": "1"}) is None


# SLURM


def test_a_step_of_slurm_meets_at_its_first_node() -> None:
    launch = found(SLURM)
    assert (launch.kind, facts(launch)) == ("SLURM", (2, 5, 0, 2, 3))
    assert launch.store == ("n01", 24569)
    assert (launch.name, launch.attempt, launch.addresses) == ("slurm-4711.0", 0, ("n01", "n01", "n02", "n02", "n03"))


def test_every_rank_of_a_step_derives_the_same_port_and_another_step_another() -> None:
    last = SLURM | {"SLURM_PROCID": "4", "SLURM_NODEID": "2"}
    assert found(last).store == found(SLURM).store != found(SLURM | {"SLURM_STEP_ID": "1"}).store
    assert facts(found(last)) == (4, 5, 0, 1, 3)


def test_a_step_on_one_node_stays_on_loopback() -> None:
    one = SLURM | {"SLURM_STEP_NODELIST": "n01", "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
    assert facts(found(one)) == (2, 5, 0, 5, 1)
    assert found(one).store[0] == "127.0.0.1"


def test_master_addr_and_port_move_the_meeting_of_a_step() -> None:
    moved = SLURM | {"MASTER_ADDR": "n02.ib", "MASTER_PORT": "12345"}
    assert found(moved).store == ("n02.ib", 12345)
    assert found(SLURM | {"MASTER_PORT": "12345"}).store == ("n01", 12345)


def test_a_requeued_job_counts_its_restarts_under_one_name() -> None:
    again = found(SLURM | {"SLURM_RESTART_COUNT": "2"})
    assert (again.attempt, again.name) == (2, found(SLURM).name)


def test_a_cyclic_distribution_of_ranks_gives_no_addresses() -> None:
    assert found(SLURM | {"SLURM_DISTRIBUTION": "cyclic"}).addresses == ()


@pytest.mark.parametrize(
    "outside",
    [
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},  # sbatch's script
        SLURM | {"SLURM_STEP_ID": "4294967291"},  # the same, of a SLURM that numbers it
        SLURM | {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_NTASKS": "4"},  # the shell of salloc, of an older SLURM
        SLURM | {"SLURM_PTY_PORT": "40000", "SLURM_JOB_NAME": "bash"},  # the shell of srun --pty
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun of one task
    ],
)
def test_what_is_no_step_of_several_is_no_launch(outside: dict[str, str]) -> None:
    assert detect(outside) is None


@pytest.mark.parametrize(
    "inside", [{"SLURM_STEP_ID": "1", "SLURM_JOB_NAME": "bash"}, {"SLURM_JOB_NAME": "train.sbatch"}]
)
def test_a_step_started_from_the_shell_of_a_step_is_one(inside: dict[str, str]) -> None:
    assert facts(found(SLURM | {"SLURM_PTY_PORT": "40000"} | inside)) == (2, 5, 0, 2, 3)


def test_bad_variables_of_a_step_are_named() -> None:
    bad = SLURM | {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NODELIST": "n[1",
        "SLURM_STEP_TASKS_PER_NODE": "x",
        "SLURM_JOB_ID": "",
    }
    assert refused(lambda: detect(bad)) == [
        f"SLURM_PROCID=5: must be less than SLURM_STEP_NUM_TASKS=5. {REMEDY} (environment)",
        "SLURM_STEP_NODELIST: is not a list of nodes: n[1. (environment)",
        "SLURM_STEP_TASKS_PER_NODE: is not a list of tasks per node: x. (environment)",
        (
            "SLURM_JOB_ID: is not set, though SLURM_STEP_ID is. "
            "Set it, or ignore the launch: TRAINKIT_LAUNCHER=none. (environment)"
        ),
    ]


# MPI


def test_open_mpi_on_one_host_meets_on_loopback() -> None:
    launch = found(OPEN_MPI | {"PMIX_NAMESPACE": "123"})
    assert (launch.kind, facts(launch), launch.store[0]) == ("Open MPI", (1, 2, 1, 2, 1), "127.0.0.1")
    assert launch.store != found(OPEN_MPI | {"PMIX_NAMESPACE": "124"}).store


@pytest.mark.parametrize(
    ("uri", "host"),
    [("42.0;tcp://10.0.0.7,172.17.0.1:45321", "10.0.0.7"), ("42.0;tcp6://[fd00::7]:45321", "fd00::7")],
)
def test_open_mpi_over_hosts_meets_where_mpirun_is(uri: str, host: str) -> None:
    over = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    launch = found(over | {"OMPI_MCA_orte_hnp_uri": uri})
    assert (launch.store[0], launch.num_hosts) == (host, 2)
    assert found(over | {"OMPI_MCA_orte_hnp_uri": uri, "MASTER_ADDR": "n1"}).store[0] == "n1"


def test_mpich_on_one_host_meets_on_loopback() -> None:
    launch = found(MPICH | {"PBS_JOBID": "9.head"})
    assert (launch.kind, facts(launch), launch.store[0]) == ("MPICH", (1, 2, 1, 2, 1), "127.0.0.1")


@pytest.mark.parametrize("environ", [OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, MPICH | {"MPI_LOCALNRANKS": "1"}])
def test_mpi_over_hosts_without_a_meeting_place_asks_for_one(environ: dict[str, str]) -> None:
    mark = "PMI_SIZE" if "PMI_SIZE" in environ else "OMPI_COMM_WORLD_SIZE"
    local = "MPI_LOCALRANKID" if "PMI_SIZE" in environ else "OMPI_COMM_WORLD_LOCAL_RANK"
    assert refused(lambda: detect(environ | {local: "0"})) == [
        (
            f"MASTER_ADDR: is not set, though {mark} is. "
            "Set it, or ignore the launch: TRAINKIT_LAUNCHER=none. (environment)"
        )
    ]


def test_half_of_mpis_variables_are_refused_by_name() -> None:
    problems = refused(lambda: detect({"PMI_SIZE": "2", "OMPI_COMM_WORLD_SIZE": ""}))
    assert [text.partition(":")[0] for text in problems] == [
        "PMI_RANK",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "MASTER_ADDR",
    ]


# Kubernetes


def test_a_container_with_pet_variables_and_no_torchrun_is_a_launch() -> None:
    launch = found(PET)
    assert (launch.kind, facts(launch), launch.store) == ("PET_NNODES", (1, 2, 0, 1, 2), ("job-node-0-0.job", 29500))
    assert (launch.takes_devices, found(PET | {"PET_NPROC_PER_NODE": "auto"}).takes_devices) == (False, True)
    assert found(PET | {"PET_NNODES": "2:2", "PET_MASTER_PORT": "3"}).store == ("job-node-0-0.job", 3)


def test_a_single_container_is_no_launch() -> None:
    assert detect({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}) is None


def test_what_only_torchruns_agents_can_do_is_refused() -> None:
    remedy = "It is for torchrun: start torchrun -m trainkit instead of trainkit. (environment)"
    assert refused(lambda: detect(PET | {"PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "4"})) == [
        f"PET_NNODES=1:2: is a range of nodes. {remedy}",
        f"PET_NPROC_PER_NODE=4: is several processes a node. {remedy}",
    ]


def test_half_of_the_pet_variables_are_refused_by_name() -> None:
    hint = "is not set, though PET_NNODES is. Set it, or ignore the launch: TRAINKIT_LAUNCHER=none. (environment)"
    assert refused(lambda: detect({"PET_NNODES": "2"})) == [f"PET_NODE_RANK: {hint}", f"PET_MASTER_ADDR: {hint}"]


# several at once


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


def test_a_cluster_in_the_config_has_priority_over_the_environment() -> None:
    spec = Spec(worker=("a:1", "b:1"), task="worker:0")
    assert present(spec.launch(TORCHRUN | SLURM)).kind == "cluster=spec"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_can_be_named_or_ignored(name: str) -> None:
    everything = {key: value for environ in ALL.values() for key, value in environ.items()} | TORCHRUN
    asked = everything | {"TRAINKIT_LAUNCHER": name}
    assert found(asked).kind == found(everything, launcher=name).kind == found(ALL[name]).kind
    assert detect(everything | {"TRAINKIT_LAUNCHER": "none"}) is None


def test_the_config_outranks_the_variable() -> None:
    assert present(Local(launcher="slurm").launch(TORCHRUN | SLURM | {"TRAINKIT_LAUNCHER": "none"})).kind == "SLURM"
    assert Local().launch(TORCHRUN | {"TRAINKIT_LAUNCHER": "none"}) is None
    assert Local(launcher="none").launch(TORCHRUN) is None
    assert Local().launch(TORCHRUN) == replace(found(TORCHRUN))


def test_a_launcher_that_is_unknown_or_absent_is_refused() -> None:
    assert refused(lambda: detect({"TRAINKIT_LAUNCHER": "slrum"})) == [
        (
            "TRAINKIT_LAUNCHER=slrum: no such launcher. Did you mean slurm? "
            "There are: torchrun, environment, tf_config, openmpi, mpich, slurm, pet, auto and none. (environment)"
        )
    ]
    assert refused(lambda: detect({}, launcher="slurm")) == [
        "cluster.launcher=slurm: this process was not started by it, or is the only one: see SLURM_STEP_ID."
    ]


def test_a_launcher_named_beside_a_cluster_spelt_out_is_refused() -> None:
    spec = Spec(worker=("a:1", "b:1"), task="worker:0")
    assert refused(lambda: spec.launch({"TRAINKIT_LAUNCHER": "slurm"})) == [
        (
            "TRAINKIT_LAUNCHER=slurm: has no effect: cluster=spec lists all tasks. "
            "Unset it, or use cluster=local. (environment)"
        )
    ]
