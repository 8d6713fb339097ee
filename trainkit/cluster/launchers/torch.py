"""torchrun, the variables that configure it, and its worker variables set by hand."""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.cluster.address import is_loopback
from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.variables import Variables


def torchrun(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch of a worker of a torchrun agent; Spark's TorchDistributor and Kubeflow's trainer set the same.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
    """
    if not environ.get("TORCHELASTIC_RUN_ID"):
        return None
    read = Variables(environ, because="TORCHELASTIC_RUN_ID")
    rank, size = read.rank_of("RANK", "WORLD_SIZE")
    local_rank, num_local = read.rank_of("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    num_hosts = read.number("GROUP_WORLD_SIZE", default=max(size // num_local, 1), least=1)
    attempt = read.number("TORCHELASTIC_RESTART_COUNT", default=0)
    store = read.store()
    read.finish()
    name = environ["TORCHELASTIC_RUN_ID"]
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
    return LaunchEnvironment(
        kind="torchrun",
        tasks=workers(size),
        rank=rank,
        local_rank=local_rank,
        num_local=num_local,
        num_hosts=num_hosts,
        store=store,
        hosts_store=rank == 0 and not agent,
        attempt=attempt,
        name="" if name == "none" else name,  # torchrun's value without --rdzv-id, which all launches share
    )


def by_hand(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torch's own `env://` reads.

    Without LOCAL_RANK and LOCAL_WORLD_SIZE, ranks whose rendezvous is at a loopback address share a host; others have
    one host each.
    """
    found = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    if not found:
        return None
    read = Variables(environ, because=found[0])
    rank, size = read.rank_of("RANK", "WORLD_SIZE")
    store = read.store()
    alone = is_loopback(store.host)
    local_rank = read.number("LOCAL_RANK", default=rank if alone else 0)
    num_local = read.number("LOCAL_WORLD_SIZE", default=size if alone else local_rank + 1, least=1)
    if not read.problems and num_local > size:
        read.report("LOCAL_WORLD_SIZE", f"must be WORLD_SIZE={size} or less.")
    if not read.problems and local_rank >= num_local:
        read.report("LOCAL_RANK", f"must be less than LOCAL_WORLD_SIZE={num_local}.")
    read.finish()
    knows_local_ranks = alone or bool(environ.get("LOCAL_WORLD_SIZE"))
    return LaunchEnvironment(
        kind="RANK and WORLD_SIZE",
        tasks=workers(size),
        rank=rank,
        local_rank=local_rank,
        num_local=num_local,
        num_hosts=max(size // num_local, 1) if knows_local_ranks else size,
        store=store,
        hosts_store=rank == 0,
        by_hand=True,
    )


def pet(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch by PET_*, with which Kubernetes operators configure torchrun, in a container without torchrun.

    Each node is then one process, which uses all its devices unless PET_NPROC_PER_NODE=1. Settings that only torchrun's
    agents support are refused: several processes per node, and a variable number of nodes.
    """
    if not environ.get("PET_NNODES"):
        return None
    low, _, high = environ["PET_NNODES"].partition(":")
    read = Variables(environ, because="PET_NNODES")
    start = "It is for torchrun: start torchrun -m trainkit instead of trainkit."
    if high not in ("", low):
        read.report("PET_NNODES", f"is a range of nodes. {start}")
    if environ.get("PET_NPROC_PER_NODE", "") not in ("", "1", "auto", "gpu", "cpu"):
        read.report("PET_NPROC_PER_NODE", f"is several processes a node. {start}")
    read.finish()
    read = Variables({**environ, "PET_NNODES": low}, because="PET_NNODES")
    size = read.number("PET_NNODES", least=1)
    if size > 1:
        rank, _ = read.rank_of("PET_NODE_RANK", "PET_NNODES")
        store = read.store(port=29500, names=("PET_MASTER_ADDR", "PET_MASTER_PORT"))  # torchrun's default port
    read.finish()
    if size == 1:
        return None
    return LaunchEnvironment(
        kind="PET_NNODES",
        tasks=workers(size),
        rank=rank,
        local_rank=0,
        num_local=1,
        num_hosts=size,
        store=store,
        takes_devices=environ.get("PET_NPROC_PER_NODE") != "1",
        hosts_store=rank == 0,
    )
