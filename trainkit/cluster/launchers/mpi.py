"""mpirun of Open MPI, and of implementations that use PMI (MPICH, Intel MPI, MVAPICH)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from trainkit.cluster.address import derived_port
from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.launchers.slurm import step_place
from trainkit.cluster.variables import Variables

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
    read = Variables(environ, because="OMPI_COMM_WORLD_SIZE")
    rank, size = read.rank_of("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = read.rank_of("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    uri = _URI.search(environ.get("OMPI_MCA_orte_hnp_uri", ""))
    name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or _job(environ)
    return _launch("Open MPI", read, (rank, size), local, host=uri[1] if uri else None, name=name)


def mpich(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch of a process of an mpiexec that uses PMI: MPICH, Intel MPI, MVAPICH.

    Under `srun --mpi=pmi2` SLURM sets the same variables and more detailed ones of its own: such a process is a task of
    a SLURM step. PMI gives neither host nor port: the rendezvous is at MASTER_ADDR; without it, at 127.0.0.1 if all
    ranks share a host.

    Source: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
    """
    if not environ.get("PMI_SIZE") or step_place(environ) == (environ.get("PMI_RANK"), environ["PMI_SIZE"]):
        return None
    read = Variables(environ, because="PMI_SIZE")
    rank, size = read.rank_of("PMI_RANK", "PMI_SIZE")
    local = read.rank_of("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _launch("MPICH", read, (rank, size), local, host=None, name=_job(environ))


def _launch(
    kind: str, read: Variables, place: tuple[int, int], local: tuple[int, int], *, host: str | None, name: str
) -> LaunchEnvironment:
    (rank, size), (local_rank, num_local) = place, local
    alone = num_local == size
    store = read.store("127.0.0.1" if alone else host, derived_port(f"{kind} {name}"))
    read.finish()
    return LaunchEnvironment(
        kind=kind,
        tasks=workers(size),
        rank=rank,
        local_rank=local_rank,
        num_local=num_local,
        num_hosts=1 if alone else max(2, -(-size // num_local)),
        store=store,
        hosts_store=rank == 0,
    )


def _job(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in _BATCH_IDS if environ.get(name)), "")
