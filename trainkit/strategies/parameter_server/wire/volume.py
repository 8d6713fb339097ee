"""The bytes that workers and servers exchange in a step, before a run starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.strategies.parameter_server.wire.protocol import row_dtype
from trainkit.strategies.parameter_server.wire.variable_shards import RowShard, VariableShards
from trainkit.strategies.traffic import Transfer
from trainkit.strategies.traffic.tables import AT_MOST, Lookups

_INDEX: Final = 8
"""Bytes of the index of a row that a worker requests."""


def pulls_of(
    shards: VariableShards,
    servers: Sequence[int],
    workers: Sequence[int],
    *,
    pulls: int,
    width: int,
    tables: Collection[int] = (),
) -> Transfer:
    """Return the pulls of a step: parameters in `width` bytes per element, and buffers, from each server.

    Args:
        shards: the parts of the servers.
        servers: ranks of the servers.
        workers: the ranks of the tasks that pull.
        pulls: number of pulls in a step.
        width: bytes of an element of a parameter.
        tables: places of variables that are pulled row by row.
    """
    sizes = [sum(_pulled(piece, width) for piece in pieces if piece.place not in tables) for pieces in shards.pieces]
    share = pulls / len(workers)
    flows = {(server, worker): size * share for server, size in zip(servers, sizes, strict=True) for worker in workers}
    return Transfer(what="variables", how="pull", flows=flows, messages=2)


def pushes_of(
    model: nn.Module,
    shards: VariableShards,
    servers: Sequence[int],
    workers: Sequence[int],
    *,
    pushes: int,
    width: int,
    tables: Collection[int] = (),
) -> Transfer:
    """Return the pushes of a step: gradients in `width` bytes per element, and sums of updated buffers.

    Args:
        model: the model; unchanged.
        shards: the parts of the servers.
        servers: ranks of the servers.
        workers: the ranks of the tasks that push.
        pushes: number of pushes in a step.
        width: bytes of an element of a gradient.
        tables: places of variables whose gradients are pushed row by row.
    """
    updated = {
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for buffer, _ in module.named_buffers(recurse=False)
    }
    master = shards.master_dtype.itemsize

    def pushed(piece: RowShard) -> int:
        if piece.place in tables:
            return 0
        if piece.variable.kind == "param":
            return piece.numel * width
        return piece.numel * master if piece.variable.name in updated else 0

    sizes = [sum(map(pushed, pieces)) for pieces in shards.pieces]
    share = pushes / len(workers)
    flows = {(worker, server): size * share for server, size in zip(servers, sizes, strict=True) for worker in workers}
    return Transfer(what="gradients", how="push", flows=flows, messages=2 * -(-pushes // len(workers)))


def rows_of(
    lookups: Mapping[int, Lookups],
    shards: VariableShards,
    servers: Sequence[int],
    workers: Sequence[int],
    *,
    num_shards: int,
    pushes: int,
    width: int,
) -> tuple[Transfer, ...]:
    """Return the transfers of rows of sparse tables and of their gradients in a step; none without tables.

    A worker reads the rows of each lookup from the servers that hold them, and pushes the rows of a work order's
    gradient. The rows of a table are counted as spread evenly over it.

    Args:
        lookups: lookups of a shard, by the index of the table.
        shards: the parts of the servers.
        servers: ranks of the servers.
        workers: the ranks of the tasks that compute.
        num_shards: shards of a step.
        pushes: pushes of a step; 0: gradients are pushed as dense ones.
        width: bytes of an element.
    """
    read, pushed = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    for server, pieces in zip(servers, shards.pieces, strict=True):
        for piece in pieces:
            if (found := lookups.get(piece.place)) is None:
                continue
            share = (piece.stop - piece.start) / piece.variable.num_rows / len(workers)
            values = piece.variable.row_numel * width
            reads = min(found.reads, found.calls * found.table.num_embeddings) * num_shards * share
            rows = found.rows(-(-num_shards // pushes)) * pushes * share if pushes else 0.0
            for worker in workers:
                _add(read, (worker, server), reads * _INDEX)
                _add(read, (server, worker), reads * values)
                _add(pushed, (worker, server), rows * (row_dtype(piece.variable.num_rows).itemsize + values))
    if not lookups:
        return ()
    calls = 2 * sum(found.calls for found in lookups.values()) * -(-num_shards // len(workers))
    transfers = (
        Transfer(what="rows of sparse tables", how="pull", flows=read, messages=calls, note=AT_MOST),
        Transfer(what="rows of sparse gradients", how="push", flows=pushed, messages=0, note=AT_MOST),
    )
    return transfers if pushes else transfers[:1]


def _add(flows: dict[tuple[int, int], float], pair: tuple[int, int], size: float) -> None:
    flows[pair] = flows.get(pair, 0.0) + size


def _pulled(piece: RowShard, width: int) -> int:
    if piece.variable.kind == "param":
        return piece.numel * width
    return piece.num_bytes if piece.variable.kind == "buffer" else 0
