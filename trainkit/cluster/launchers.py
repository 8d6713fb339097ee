"""Read the launch of a process from the variables of its launcher: torchrun, SLURM, mpirun, or a user's own shell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from trainkit.cluster.address import Address, derived_port, is_loopback
from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.members import launch_of
from trainkit.cluster.variables import Variables

T = TypeVar("T")


def _launch(
    kind: str, world: tuple[int, int], local: tuple[int, int], store: Address, *, num_hosts: int, **more: Any
) -> LaunchEnvironment:
    """Return the launch of a rank; `world` and `local` are the rank and the number of ranks, of all and on its host."""
    (rank, size), (local_rank, num_local) = world, local
    fields: dict[str, Any] = {"hosts_store": rank == 0, **more}
    return LaunchEnvironment(
        kind=kind, tasks=workers(size), rank=rank, local_rank=local_rank, num_local=num_local, num_hosts=num_hosts,
        store=store, **fields,
    )  # fmt: skip


def torchrun(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch of a worker of a torchrun agent; Spark's TorchDistributor and Kubeflow's trainer set the same.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
    """
    if not environ.get("TORCHELASTIC_RUN_ID"):
        return None
    variables = Variables(environ, because="TORCHELASTIC_RUN_ID")
    rank, size = world = variables.rank_of("RANK", "WORLD_SIZE")
    _, num_local = local = variables.rank_of("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    num_hosts = variables.number("GROUP_WORLD_SIZE", default=max(size // num_local, 1), least=1)
    attempt = variables.number("TORCHELASTIC_RESTART_COUNT", default=0)
    store = variables.store()
    variables.finish()
    name = environ["TORCHELASTIC_RUN_ID"]
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
    name = "" if name == "none" else name  # torchrun's value without --rdzv-id, which all launches share
    hosts_store = rank == 0 and not agent
    return _launch(
        "torchrun", world, local, store, num_hosts=num_hosts, hosts_store=hosts_store, attempt=attempt, name=name
    )


def by_hand(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torch's own `env://` reads.

    Without LOCAL_RANK and LOCAL_WORLD_SIZE, ranks whose rendezvous is at a loopback address share a host; others have
    one host each.
    """
    names = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    if not names:
        return None
    variables = Variables(environ, because=names[0])
    rank, size = world = variables.rank_of("RANK", "WORLD_SIZE")
    store = variables.store()
    alone = is_loopback(store.host)
    local_rank = variables.number("LOCAL_RANK", default=rank if alone else 0)
    num_local = variables.number("LOCAL_WORLD_SIZE", default=size if alone else local_rank + 1, least=1)
    if not variables.problems and num_local > size:
        variables.report("LOCAL_WORLD_SIZE", f"must be WORLD_SIZE={size} or less.")
    if not variables.problems and local_rank >= num_local:
        variables.report("LOCAL_RANK", f"must be less than LOCAL_WORLD_SIZE={num_local}.")
    variables.finish()
    knows_local_ranks = alone or bool(environ.get("LOCAL_WORLD_SIZE"))
    num_hosts = max(size // num_local, 1) if knows_local_ranks else size
    return _launch("RANK and WORLD_SIZE", world, (local_rank, num_local), store, num_hosts=num_hosts, by_hand=True)


def pet(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch by PET_*, with which Kubernetes operators configure torchrun, in a container without torchrun.

    Each node is then one process, which uses all its devices unless PET_NPROC_PER_NODE=1. Settings that only torchrun's
    agents support are refused: several processes per node, and a variable number of nodes.
    """
    if not environ.get("PET_NNODES"):
        return None
    low, _, high = environ["PET_NNODES"].partition(":")
    variables = Variables(environ, because="PET_NNODES")
    start = "It is for torchrun: start torchrun -m trainkit instead of trainkit."
    if high not in ("", low):
        variables.report("PET_NNODES", f"is a range of nodes. {start}")
    if environ.get("PET_NPROC_PER_NODE", "") not in ("", "1", "auto", "gpu", "cpu"):
        variables.report("PET_NPROC_PER_NODE", f"is several processes a node. {start}")
    variables.finish()
    variables = Variables({**environ, "PET_NNODES": low}, because="PET_NNODES")
    size = variables.number("PET_NNODES", least=1)
    if size > 1:
        world = variables.rank_of("PET_NODE_RANK", "PET_NNODES")
        store = variables.store(port=29500, names=("PET_MASTER_ADDR", "PET_MASTER_PORT"))  # torchrun's default port
    variables.finish()
    if size == 1:
        return None
    takes_devices = environ.get("PET_NPROC_PER_NODE") != "1"
    return _launch("PET_NNODES", world, (0, 1), store, num_hosts=size, takes_devices=takes_devices)


_NAME: Final = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+(?=,|\Z)")
_PARTS: Final = re.compile(r"\[[^\]]*\]|[^\[]+")
_NUMBERS: Final = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def node_names(text: str) -> list[str]:
    """Return the names in a list of nodes, in order; numbers keep their leading zeros.

    Raises:
        ValueError: brackets or ranges are invalid.

    Example:
        >>> node_names("n[01-03,7],r[1-2]n[5,6],login")
        ['n01', 'n02', 'n03', 'n7', 'r1n5', 'r1n6', 'r2n5', 'r2n6', 'login']
    """
    names = _NAME.findall(text)
    if ",".join(names) != text:
        raise ValueError(f"is not a list of nodes: {text}")
    return ["".join(parts) for name in names for parts in itertools.product(*map(_variants, _PARTS.findall(name)))]


def _variants(part: str) -> list[str]:
    """Return the texts that a part of a name stands for: a list of numbers in brackets, or itself."""
    if not part.startswith("["):
        return [part]
    texts: list[str] = []
    for item in part[1:-1].split(","):
        if (ends := _NUMBERS.fullmatch(item)) is None:
            raise ValueError(f"is not a list of nodes: {part}")
        texts += [f"{number:0{len(ends[1])}d}" for number in range(int(ends[1]), int(ends[2] or ends[1]) + 1)]
    return texts


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, in the order of the nodes.

    Raises:
        ValueError: the text is not such a list.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"is not a list of tasks per node: {text}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


_FIRST_SPECIAL: Final = 0xFFFFFFF0
"""Step ids from here on are not srun's: 0xfffffffb is a batch script, 0xfffffffa the shell of salloc (slurm.h)."""

TASKS: Final = "TRAINKIT_TASKS"
"""The environment variable with the ROLE:INDEX of each task of a step by rank, in the script of `emit slurm`."""

_SHELLS: Final = ("bash", "sh", "zsh", "fish", "tcsh", "csh", "ksh", "dash")


def step_rank(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the rank and size of this process in its step, as written; None outside of a step.

    The script of sbatch and the shell of salloc have the variables of the job, but are not a step. The shell of `srun
    --pty` is a step, but an interactive one: it did not start other tasks of a run.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if not step or int(step) >= _FIRST_SPECIAL or _is_interactive(environ):
        return None
    size = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    return environ.get("SLURM_PROCID", ""), size


def _is_interactive(environ: Mapping[str, str]) -> bool:
    """Return whether this is the shell of `srun --pty`: the first step of a job that is named after the shell.

    Processes that srun or sbatch starts from that shell inherit SLURM_PTY_PORT (seen with SLURM 22.05). If such a step
    were taken for a shell, each of its tasks would silently train alone; a shell taken for a step waits and reports it.
    """
    is_shell = environ.get("SLURM_JOB_NAME", "").rpartition("/")[2] in _SHELLS
    return bool(environ.get("SLURM_PTY_PORT")) and environ.get("SLURM_STEP_ID") == "0" and is_shell


def slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch of a task of a step with several tasks.

    The rendezvous is at the first node of the step, where rank 0 is, at a port derived from the ids of job and step,
    unless MASTER_ADDR and MASTER_PORT are set. In a script of `emit slurm` the tasks may have roles.

    Source: https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".
    """
    step = step_rank(environ)
    if step is None or step[1] == "1":
        return None
    variables = Variables(environ, because="SLURM_STEP_ID")
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    _, size = world = variables.rank_of("SLURM_PROCID", size_name)
    local_rank, node = variables.number("SLURM_LOCALID"), variables.number("SLURM_NODEID", default=0)
    nodes = _list(variables, "SLURM_STEP_NODELIST", node_names, default=[""])
    counts = _list(variables, "SLURM_STEP_TASKS_PER_NODE", tasks_per_node, default=[])
    job = f"slurm {variables.text('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    alone = len(nodes) == 1
    num_local = counts[node] if node < len(counts) else (size if alone else local_rank + 1)
    if not variables.problems and local_rank >= num_local:
        variables.report("SLURM_LOCALID", f"must be less than the {num_local} tasks of its node.")
    store = variables.store("127.0.0.1" if alone else nodes[0], derived_port(job))
    attempt = variables.number("SLURM_RESTART_COUNT", default=0)
    names = environ.get(TASKS, "").split()
    if names and len(names) != size:
        variables.report(TASKS, f"must name a task for each of the {size} of the step.")
    variables.finish()
    if names:  # in turn over the nodes; those of one node have ports of their own
        members, (role, _, index) = dict[str, list[str]](), names[world[0]].partition(":")
        for rank, task in enumerate(names):
            address = f"{nodes[rank % len(nodes)]}:{store.port + rank // len(nodes)}"
            members.setdefault(task.partition(":")[0], []).append(address)
        return replace(launch_of(members, (role, int(index)), kind="SLURM"), attempt=attempt)
    addresses = _addresses(nodes, counts, size, environ.get("SLURM_DISTRIBUTION", "block"))
    return _launch(
        "SLURM", world, (local_rank, num_local), store,
        num_hosts=len(nodes), attempt=attempt, name=job.replace(" ", "-"), addresses=addresses,
    )  # fmt: skip


def _list(variables: Variables, name: str, parse: Callable[[str], list[T]], *, default: list[T]) -> list[T]:
    """Return the list of a variable, as `parse` reads it."""
    try:
        text = variables.text(name)
        return (parse(text) if text else []) or default
    except ValueError as error:
        variables.report(name, f"{error}.", show_value=False)
        return default


def _addresses(nodes: list[str], counts: list[int], size: int, distribution: str) -> tuple[str, ...]:
    """Return the node of every rank if ranks fill node after node; otherwise an empty tuple."""
    if len(counts) != len(nodes) or sum(counts) != size:
        return ()
    if max(counts) > 1 and len(nodes) > 1 and distribution.partition(":")[0] not in ("block", "pack"):
        return ()
    return tuple(node for node, count in zip(nodes, counts, strict=True) for _ in range(count))


_URI: Final = re.compile(r"tcp6?://(\[[^\]]+\]|[^,:\[\]]+)")
_BATCH_IDS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


def open_mpi(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch of a process of Open MPI's mpirun.

    Open MPI does not publish the host of rank 0. The rendezvous is at MASTER_ADDR; without it, at 127.0.0.1 if all
    ranks share a host, else at the host of mpirun itself, where rank 0 is unless the hostfile begins with another host.

    Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    """
    if not environ.get("OMPI_COMM_WORLD_SIZE"):
        return None
    variables = Variables(environ, because="OMPI_COMM_WORLD_SIZE")
    rank, size = variables.rank_of("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = variables.rank_of("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    uri = _URI.search(environ.get("OMPI_MCA_orte_hnp_uri", ""))
    name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or _job(environ)
    return _by_mpi("Open MPI", variables, (rank, size), local, host=uri[1] if uri else None, name=name)


def mpich(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch of a process of an mpiexec that uses PMI: MPICH, Intel MPI, MVAPICH.

    Under `srun --mpi=pmi2` SLURM sets the same variables and more detailed ones of its own: such a process is a task of
    a SLURM step. PMI gives neither host nor port: the rendezvous is at MASTER_ADDR; without it, at 127.0.0.1 if all
    ranks share a host.

    Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
    """
    if not environ.get("PMI_SIZE") or step_rank(environ) == (environ.get("PMI_RANK"), environ["PMI_SIZE"]):
        return None
    variables = Variables(environ, because="PMI_SIZE")
    rank, size = variables.rank_of("PMI_RANK", "PMI_SIZE")
    local = variables.rank_of("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _by_mpi("MPICH", variables, (rank, size), local, host=None, name=_job(environ))


def _by_mpi(
    kind: str, variables: Variables, world: tuple[int, int], local: tuple[int, int], *, host: str | None, name: str
) -> LaunchEnvironment:
    (_, size), (_, num_local) = world, local
    alone = num_local == size
    store = variables.store("127.0.0.1" if alone else host, derived_port(f"{kind} {name}"))
    variables.finish()
    return _launch(kind, world, local, store, num_hosts=1 if alone else max(2, -(-size // num_local)))


def _job(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in _BATCH_IDS if environ.get(name)), "")
