"""The transfers of a step, by which a strategy describes its exchanges.

Bytes are those of the tensors. Headers of TCP and of the transport, and the small sums of losses and counters, come on
top: below 5 % of transfers of 100 kB and more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.numerics.batch import owned_nodes
from trainkit.strategies.base import CollectiveCall, Flows, PlanContext, StepCut, Strategy, Transfer
from trainkit.strategies.tensors.layouts import row_dtype


def ring(ranks: Sequence[int], num_bytes: float) -> Flows:
    """Return flows in which each rank sends `num_bytes` to the next one; none for a single rank.

    Example:
        >>> ring([0, 1, 2], 8.0)
        {(0, 1): 8.0, (1, 2): 8.0, (2, 0): 8.0}
    """
    if len(ranks) == 1:
        return {}
    return {(rank, ranks[(index + 1) % len(ranks)]): num_bytes for index, rank in enumerate(ranks)}


def all_reduce(ranks: Sequence[int], num_bytes: float) -> Flows:
    """Return the flows of summing a vector over ranks: a reduce-scatter, then an all-gather.

    Example:
        >>> all_reduce([0, 1], 8.0)
        {(0, 1): 8.0, (1, 0): 8.0}

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return ring(ranks, 2 * (len(ranks) - 1) / len(ranks) * num_bytes)


def all_gather(ranks: Sequence[int], num_bytes: float) -> Flows:
    """Return the flows of gathering a vector of this size, of which each rank has a part."""
    return ring(ranks, (len(ranks) - 1) / len(ranks) * num_bytes)


def reduce_scatter(ranks: Sequence[int], num_bytes: float, *, device_type: str) -> Flows:
    """Return the flows of summing a vector of this size, of which each rank keeps a part.

    On the CPU, gloo sums the whole vector on every rank (measured with torch 2.13 on 2, 3 and 4 ranks).
    """
    return all_reduce(ranks, num_bytes) if device_type == "cpu" else all_gather(ranks, num_bytes)


def reduce_to_first(ranks: Sequence[int], num_bytes: float) -> Flows:
    """Return the flows of summing a vector on the first rank: a reduce-scatter, then each part is sent there."""
    return joined(all_gather(ranks, num_bytes), {(rank, ranks[0]): num_bytes / len(ranks) for rank in ranks[1:]})


def broadcast(ranks: Sequence[int], num_bytes: float) -> Flows:
    """Return the flows of a binomial tree from the first rank.

    Example:
        >>> sorted(broadcast([0, 1, 2, 3], 1.0))
        [(0, 1), (0, 2), (1, 3)]
    """
    flows, reached = dict[tuple[int, int], float](), 1
    while reached < len(ranks):
        for index in range(min(reached, len(ranks) - reached)):
            flows[ranks[index], ranks[index + reached]] = num_bytes
        reached *= 2
    return flows


def joined(*several: Flows) -> Flows:
    """Return the sum of flows, pair by pair.

    Example:
        >>> joined({(0, 1): 1.0}, {(0, 1): 2.0, (1, 0): 4.0})
        {(0, 1): 3.0, (1, 0): 4.0}
    """
    total: dict[tuple[int, int], float] = {}
    for flows in several:
        for pair, num_bytes in flows.items():
            total[pair] = total.get(pair, 0.0) + num_bytes
    return total


def times(flows: Flows, factor: float) -> Flows:
    """Return flows multiplied by a number."""
    return {pair: num_bytes * factor for pair, num_bytes in flows.items()}


def traffic_of(strategy: Strategy, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
    """Return the transfers of a step; none for a strategy of one process, None if they are not known."""
    return () if len(strategy.tasks(context)) == 1 else strategy.traffic(model, context, cut)


def ranks_of(strategy: Strategy, context: PlanContext) -> Sequence[int]:
    """Return the ranks that compute, without an evaluator."""
    return [task.rank for task in strategy.tasks(context) if not task.is_evaluator]


def ranks_a_host(context: PlanContext, num_ranks: int) -> int:
    """Return the ranks of each host, which are neighbours."""
    return num_ranks if context.launch is None else max(num_ranks // context.launch.num_hosts, 1)


def exchanged_elements(model: nn.Module) -> int:
    """Return the elements of the vector that replicas sum: gradients, and buffers that forward passes update.

    Only buffers of batch normalisation count: torch has no other layer that updates a buffer.

    Example:
        >>> exchanged_elements(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        22
    """
    grads = sum(param.numel() for param in model.parameters() if param.requires_grad)
    normed = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return grads + sum(buffer.numel() for module in normed for buffer in module.buffers(recurse=False))


def observed_transfers(
    calls: Mapping[int, Sequence[CollectiveCall]],
    *,
    alike: Callable[[int], Sequence[int]],
    device_type: str,
    purpose: Callable[[int, CollectiveCall], tuple[str, bool]],
    share: Callable[[int], float] = lambda _rank: 1.0,
) -> tuple[Transfer, ...]:
    """Return the transfers of a step in which each group of ranks does what that of an observed rank does.

    Args:
        calls: the collectives of each observed rank.
        alike: function that returns the ranks, in order, that do what an observed rank does.
        device_type: cpu or cuda.
        purpose: function that returns what a collective of a rank serves, and whether ranks compute meanwhile.
        share: function that returns the share of an observed rank's shards that a rank computes.
    """
    flows_of: dict[tuple[str, bool, str], Flows] = {}
    messages: dict[tuple[str, bool, str], Counter[int]] = {}
    sizes: dict[tuple[int, tuple[str, bool, str], tuple[int, ...]], tuple[float, float]] = {}
    for rank, of_rank in calls.items():
        for call in of_rank:
            if call.kind != "send" and any(other < rank for other in calls if other in call.ranks):
                continue  # counted for the other stage
            call_key = rank, (*purpose(rank, call), call.kind), call.ranks
            size, count = sizes.get(call_key, (0, 0))
            sizes[call_key] = size + call.times * call.num_bytes, count + call.times
    for (rank, key, ranks), (size, count) in sizes.items():
        kind, groups, covered = key[-1], list[list[int]](), set[int]()
        for peer in alike(rank):
            if peer not in covered:
                groups.append([member + peer - rank for member in ranks])
                covered.update(groups[-1])
        group_flows = [_flows(kind, group, size * share(group[0]), device_type) for group in groups]
        twice = kind == "all-reduce" or (kind == "reduce-scatter" and device_type == "cpu")
        flows_of[key] = joined(flows_of.get(key, {}), *group_flows)
        rounds = 1 if kind == "send" else (len(ranks) - 1) * (2 if twice else 1)
        messages.setdefault(key, Counter())[rank] += round(count) * rounds
    return tuple(
        Transfer(
            what=what,
            how="point to point" if kind == "send" else kind,
            flows=flows,
            messages=max(messages[what, overlaps, kind].values()),
            overlaps=overlaps,
        )
        for (what, overlaps, kind), flows in flows_of.items()
        if flows
    )


def _flows(kind: str, ranks: Sequence[int], size: float, device_type: str) -> Flows:
    if kind == "send":
        return {(ranks[0], ranks[1]): size}
    if kind == "reduce-scatter":
        return reduce_scatter(ranks, size, device_type=device_type)
    if kind == "all-to-all":
        return {(sender, receiver): size / len(ranks) for sender in ranks for receiver in ranks if sender != receiver}
    return all_reduce(ranks, size) if kind == "all-reduce" else all_gather(ranks, size)


@dataclass(frozen=True, kw_only=True)
class Vector:
    """The vector that the ranks sum in a step."""

    num_bytes: float
    element_bytes: int
    """Bytes of a sent element."""
    bucket_mb: float = 25.0
    """MiB that the backend exchanges at once; 0: all."""

    @property
    def num_buckets(self) -> int:
        """Number of exchanges into which the backend cuts the vector."""
        return max(1, math.ceil(self.num_bytes / (self.bucket_mb * 2**20))) if self.bucket_mb else 1


def reduction(reduce: str, ranks: Sequence[int], vector: Vector, *, ranks_a_host: int) -> tuple[Transfer, ...]:
    """Return the transfers of a reducer, by its name."""
    size, count, buckets = vector.num_bytes, len(ranks), vector.num_buckets
    if count == 1:
        return ()
    if reduce == "shared_memory":
        flows = all_reduce(ranks, size)
        return (Transfer(what="gradients", how="shared memory", flows=flows, messages=2, by="memory"),)
    if reduce == "to_one_device":
        flows = joined(reduce_to_first(ranks, size), broadcast(ranks, size))
        return (Transfer(what="gradients", how="reduce and broadcast", flows=flows, messages=2 * (count - 1)),)
    if reduce == "hierarchical":
        return _hierarchical(ranks, size, ranks_a_host)
    return (
        Transfer(
            what="gradients",
            how="ring" if reduce == "ring" else "all-reduce",
            flows=all_reduce(ranks, size),
            messages=2 * (count - 1) * (1 if reduce == "ring" else buckets),
            overlaps=reduce != "ring" and buckets > 1,
        ),
    )


def _hierarchical(ranks: Sequence[int], size: float, ranks_a_host: int) -> tuple[Transfer, ...]:
    hosts = [ranks[start : start + ranks_a_host] for start in range(0, len(ranks), ranks_a_host)]
    flows = joined(
        *(joined(reduce_to_first(host, size), broadcast(host, size)) for host in hosts if len(host) > 1),
        all_reduce([host[0] for host in hosts], size),
    )
    messages = 2 * (ranks_a_host - 1) + 2 * (len(hosts) - 1)
    return (Transfer(what="gradients", how="reduce, all-reduce and broadcast", flows=flows, messages=messages),)


def powersgd(
    ranks: Sequence[int], vector: Vector, model: nn.Module, *, rank: int, after: int, sparse: Sequence[Tensor] = ()
) -> tuple[Transfer, ...]:
    """Return the transfers of PowerSGD: whole gradients in the first steps, then two thin matrices for each matrix.

    Args:
        ranks: the replicas.
        vector: the vector of the first steps.
        model: the model; unchanged.
        rank: columns of the matrices.
        after: number of first steps.
        sparse: the parameters whose gradients are not in the vector.

    Source: Vogels et al. 2019, arXiv:1905.13727; torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, whose
    `min_compression_rate` is 2.
    """
    if len(ranks) == 1:
        return ()
    left_out = set(map(id, sparse))
    grads = [param for param in model.parameters() if param.requires_grad and id(param) not in left_out]
    buffer_bytes = (
        vector.num_bytes - sum(param.numel() for param in grads) * vector.element_bytes
    )  # buffers are not compressed
    thin = sum(_thin_elements(tuple(param.shape), rank) for param in grads) * vector.element_bytes + buffer_bytes
    rounds = 2 * (len(ranks) - 1)
    full = all_reduce(ranks, vector.num_bytes)
    return (
        Transfer(what="gradients", how="all-reduce", flows=full, messages=rounds, end_step=after),
        Transfer(
            what="gradients",
            how=f"PowerSGD of rank {rank}",
            flows=all_reduce(ranks, thin),
            messages=3 * rounds,
            first_step=after,
        ),
    )


def _thin_elements(shape: tuple[int, ...], rank: int) -> int:
    """Return the elements that PowerSGD sends of a gradient.

    Example:
        >>> _thin_elements((100, 50), 1), _thin_elements((3, 3), 1), _thin_elements((7,), 1)
        (150, 9, 7)
    """
    numel = math.prod(shape)
    rows = shape[0] if shape else 1
    columns = numel // max(rows, 1)
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if thin * 2 < numel else numel


def in_lanes(ranks: Sequence[int], vector: Vector, *, lanes: int, num_shards: int) -> tuple[Transfer, ...]:
    """Return the transfers of a sum in the order of the lanes: an exchange of slices of partial sums, then a gather."""
    count = len(ranks)
    if count == 1:
        return ()
    part = vector.num_bytes / count
    exchanged = {
        (sender, receiver): part * len(owned_nodes(rank=index, num_ranks=count, num_lanes=lanes, num_shards=num_shards))
        for index, sender in enumerate(ranks)
        for receiver in ranks
        if sender != receiver
    }
    flows = joined(exchanged, all_gather(ranks, vector.num_bytes))
    return (Transfer(what="gradients", how="lanes", flows=flows, messages=2 * (count - 1)),)


AT_MOST: Final = (
    "the rows of sparse tables are counted as if each lookup of a step read a different row: equal indices reduce "
    "their number."
)
"""The note of transfers of rows."""


def sparse_tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the tables with sparse gradients, by name.

    A table whose weight another module uses as well is excluded: the sum of its gradients is dense.

    Example:
        >>> list(sparse_tables(nn.Sequential(nn.Linear(2, 2), nn.Embedding(9, 2, sparse=True))))
        ['1']
    """
    uses = Counter(id(param) for module in model.modules() for param in module._parameters.values())  # noqa: SLF001
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.sparse
        and module.weight.requires_grad
        and uses[id(module.weight)] == 1
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookups:
    """The lookups of a table in a shard."""

    table: nn.Embedding | nn.EmbeddingBag
    indices: int
    """Number of indices of the forward pass."""
    reads: int
    """Number of indices of the forward pass and of its recomputation in backward."""
    calls: int
    """Number of lookups in sequence, including recomputed ones."""

    def rows(self, shards: int) -> int:
        """Return the largest number of rows that `shards` shards read."""
        return min(self.indices * shards, self.table.num_embeddings)


def lookups_of(model: nn.Module, cut: StepCut) -> Mapping[str, Lookups] | None:
    """Return the lookups of a shard in each table with sparse gradients; None if they are not known before the run.

    Args:
        model: the model; unchanged.
        cut: the cut of a step, with a dry run.
    """
    tables = sparse_tables(model)
    if not tables:
        return {}
    calls = None if cut.dry_run is None else cut.dry_run.lookups(tables)
    if calls is None:
        return None
    return {
        name: Lookups(
            table=table,
            indices=sum(size for size, is_again in calls[name] if not is_again),
            reads=sum(size for size, _ in calls[name]),
            calls=len(calls[name]),
        )
        for name, table in tables.items()
    }


def weights_of(lookups: Mapping[str, Lookups]) -> list[Tensor]:
    """Return the weights of tables."""
    return [lookup.table.weight for lookup in lookups.values()]


def gathered_rows(
    lookups: Mapping[str, Lookups], ranks: Sequence[int], *, shards: int, width: int
) -> tuple[Transfer, ...]:
    """Return the exchange of sparse gradients between replicas: every rank gathers the rows and values of all ranks.

    Args:
        lookups: the lookups of a shard, by the name of the table.
        ranks: the replicas.
        shards: number of shards of the replica with the most.
        width: bytes of an element of a gradient.
    """
    if not lookups or len(ranks) == 1:
        return ()
    flows = []
    for lookup in lookups.values():
        row = row_dtype(lookup.table.num_embeddings).itemsize + lookup.table.embedding_dim * width
        flows.append(all_gather(ranks, len(ranks) * lookup.rows(shards) * row))
    return (
        Transfer(
            what="rows of sparse gradients",
            how="all-gather",
            flows=joined(*flows),
            messages=4 * len(lookups) * (len(ranks) - 1),  # lengths and tensors, of indices and of values
            note=AT_MOST,
        ),
    )
