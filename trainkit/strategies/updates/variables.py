"""The variables of a training, in the order on which all tasks agree, and their partition over the servers."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext, Transfer
from trainkit.strategies.core.buffers import sample_dims_of
from trainkit.strategies.core.refusals import optimizer_problems
from trainkit.strategies.tensors.layouts import dense_strides, part_strides, row_dtype
from trainkit.strategies.traffic import AT_MOST, Lookups

Kind = Literal["param", "frozen", "buffer"]
"""Trainable parameters, frozen parameters, and buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A tensor that servers hold.

    Example:
        >>> Variable(name="w", kind="param", shape=(3, 5), dtype=torch.float32).row_bytes
        20
    """

    name: str
    """The canonical name."""
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of the master parameter of a trainable parameter, else the dtype in the model."""
    strides: tuple[int, ...] | None = None
    """The strides of a trainable parameter in the model, which its gradients and the optimizer's slots share; None:
    contiguous, as all other variables on a server.
    """
    saved: bool = True
    """Whether a checkpoint holds the variable; some buffers are recomputed."""
    is_added: bool = False
    """Whether a buffer holds state per sample: the changes of all shards are added to it."""

    @property
    def num_rows(self) -> int:
        """The number of rows into which the variable can be split: its length along dim 0; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.row_numel * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole variable."""
        return self.num_rows * self.row_bytes

    @property
    def key(self) -> str:
        """Name of the variable in a checkpoint."""
        return f"{'buffer' if self.kind == 'buffer' else 'param'}/{self.name}"


def variables_of(model: nn.Module, master_dtype: torch.dtype) -> tuple[Variable, ...]:
    """Return trainable parameters, frozen ones, and buffers of a model, possibly on meta, each in canonical order.

    Example:
        >>> [(v.name, v.kind) for v in variables_of(nn.BatchNorm1d(2), torch.float32)][:3]
        [('weight', 'param'), ('bias', 'param'), ('running_mean', 'buffer')]
    """
    params, saved = list(model.named_parameters()), model.state_dict()
    trained = [_variable(name, "param", param, dtype=master_dtype) for name, param in params if param.requires_grad]
    frozen = [_variable(name, "frozen", param) for name, param in params if not param.requires_grad]
    added = {name for name, dim in sample_dims_of(model).items() if dim is not None}
    buffers = [
        replace(_variable(name, "buffer", buffer, saved=name in saved), is_added=name in added)
        for name, buffer in model.named_buffers()
    ]
    return (*trained, *frozen, *buffers)


def _variable(
    name: str, kind: Kind, tensor: Tensor, *, dtype: torch.dtype | None = None, saved: bool = True
) -> Variable:
    strides = dense_strides(tensor) if kind == "param" else None
    shape = tuple(tensor.shape)
    return Variable(name=name, kind=kind, shape=shape, dtype=dtype or tensor.dtype, strides=strides, saved=saved)


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the model's own tensors, one per variable and in their order: the destination of a pull.

    Example:
        >>> [tensor.dim() for tensor in tensors_of(nn.Linear(3, 2))]
        [2, 1]
    """
    params = [param.data for param in model.parameters() if param.requires_grad]
    return [*params, *(param.data for param in model.parameters() if not param.requires_grad), *model.buffers()]


def unsaved_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no checkpoint holds, by their names in one; they are recomputed with the model.

    Example:
        >>> unsaved_of(nn.BatchNorm1d(2))
        {}
    """
    saved = model.state_dict()
    return {f"buffer/{name}": buffer for name, buffer in model.named_buffers() if name not in saved}


_SNAP: Final = 0.05
"""Largest distance by which a boundary moves to the edge of a variable, as a fraction of a server's shard; two
boundaries make 10 %.
"""
_VECTOR: Final = 16
"""Largest number of elements that a processor handles in one vector. A fused optimizer rounds the last elements of a
tensor, which do not fill a vector, differently from the rest (FMA): a split at a multiple leaves each element in its
place, and so its bits.
"""
_SMALL_BYTES: Final = 2**20
"""Below this size, split only at multiples of the vector width (keeps bits equal) even if shards become uneven."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShard:
    """The rows of a variable that one server holds.

    Example:
        >>> import torch
        >>> table = Variable(name="w", kind="param", shape=(8, 3), dtype=torch.float32)
        >>> RowShard(index=0, variable=table, start=2, stop=5).shape
        (3, 3)
    """

    index: int
    """The index of the variable."""
    variable: Variable
    start: int
    """The first row."""
    stop: int
    """The row after the last one."""

    @property
    def is_whole(self) -> bool:
        """Whether the part contains all rows."""
        return self.start == 0 and self.stop == self.variable.num_rows

    @property
    def num_rows(self) -> int:
        """Number of its rows."""
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return (self.num_rows, *self.variable.shape[1:]) if self.variable.shape else ()

    @property
    def strides(self) -> tuple[int, ...] | None:
        """The strides of the part, with its dims in memory in the order of the variable's; None: contiguous."""
        return self.variable.strides if self.is_whole else part_strides(self.shape, self.variable.strides)

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return self.num_rows * self.variable.row_numel

    @property
    def num_bytes(self) -> int:
        """Bytes of the part on the server."""
        return self.numel * self.variable.dtype.itemsize

    @property
    def region(self) -> tuple[slice, ...]:
        """Region of the part in the full tensor."""
        whole = tuple(slice(0, size) for size in self.variable.shape)
        return whole if self.is_whole else (slice(self.start, self.stop), *whole[1:])

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a full tensor, as a view."""
        return whole if self.is_whole else whole[self.start : self.stop]


class VariableShards:
    """The rows of the variables that each server holds.

    Trainable parameters, frozen ones and buffers are each partitioned by themselves, so that the traffic of a step is
    as balanced as the memory. A boundary moves to the edge of a variable within 5 % of a shard, else it lies between
    two rows; at most one variable per boundary is split.

    Example:
        >>> import torch
        >>> table = Variable(name="w", kind="param", shape=(1000, 64), dtype=torch.float32)
        >>> [VariableShards([table], 2).bytes_of(server) for server in (0, 1)]
        [128000, 128000]
    """

    def __init__(self, variables: Sequence[Variable], num_servers: int) -> None:
        self.variables = tuple(variables)
        self.num_servers = num_servers
        lines = [f"{v.kind} {v.name} {v.shape} {v.dtype} {v.strides} {v.saved}" for v in self.variables]
        self.digest = hashlib.sha256("\n".join([str(num_servers), *lines]).encode()).hexdigest()
        """Two tasks with the same one have the same variables and the same partition."""
        trained = [variable.dtype for variable in self.variables if variable.kind == "param"]
        self.master_dtype = trained[0] if trained else torch.float32
        parts: list[list[RowShard]] = [[] for _ in range(num_servers)]
        for kind in ("param", "frozen", "buffer"):
            indices = [index for index, variable in enumerate(self.variables) if variable.kind == kind]
            for server, pieces in enumerate(_cut(self.variables, indices, num_servers)):
                parts[server].extend(pieces)
        self.pieces = tuple(map(tuple, parts))

    def bytes_of(self, server: int) -> int:
        """Return the bytes of the variables that a server holds."""
        return sum(piece.num_bytes for piece in self.pieces[server])

    def most_bytes(self, server: int) -> int:
        """Return the limit of the numbers of a frame: the widest numbers, and an index, for each element."""
        return 1024 + 32 * sum(piece.numel for piece in self.pieces[server])

    @property
    def split(self) -> tuple[str, ...]:
        """The names of the trainable parameters that are split by rows."""
        return self._names(lambda piece: not piece.is_whole)

    @property
    def roughly_split(self) -> tuple[str, ...]:
        """The names of variables whose split may change the last bit of a fused optimizer's update."""
        return self._names(_is_rough)

    def _names(self, chooses: Callable[[RowShard], bool]) -> tuple[str, ...]:
        params = [piece for pieces in self.pieces for piece in pieces if piece.variable.kind == "param"]
        return tuple(dict.fromkeys(piece.variable.name for piece in params if chooses(piece)))


def _cut(variables: Sequence[Variable], indices: Sequence[int], num_servers: int) -> list[list[RowShard]]:
    """Return the pieces of some variables on each server."""
    chosen = [variables[index] for index in indices]
    edges = [0, *accumulate(variable.num_bytes for variable in chosen)]
    inner = [_boundary(chosen, edges, server, num_servers) for server in range(1, num_servers)]
    by_server = []
    for first, last in pairwise([(0, 0), *inner, (len(chosen), 0)]):
        pieces = []
        for number in range(first[0], last[0] + (last[1] > 0)) if first != last else ():
            start = first[1] if number == first[0] else 0
            stop = last[1] if number == last[0] else chosen[number].num_rows
            pieces.append(RowShard(index=indices[number], variable=chosen[number], start=start, stop=stop))
        by_server.append(pieces)
    return by_server


def _boundary(variables: Sequence[Variable], edges: Sequence[int], server: int, num_servers: int) -> tuple[int, int]:
    """Return (variable, row) where a server's range begins."""
    share = edges[-1] / num_servers
    target = share * server
    nearest = min(range(len(edges)), key=lambda edge: abs(edges[edge] - target))
    if abs(edges[nearest] - target) <= _SNAP * share:
        return nearest, 0
    number = next(index for index in range(len(variables)) if edges[index + 1] > target)
    variable = variables[number]
    together = _VECTOR // gcd(_VECTOR, variable.row_numel)
    if together * variable.row_bytes > _SNAP * share and share > _SMALL_BYTES:
        together = 1
    row = round((target - edges[number]) / (variable.row_bytes * together)) * together
    return (number, row) if row < variable.num_rows else (number + 1, 0)


def _is_rough(piece: RowShard) -> bool:
    """Return whether another number of servers would round differently: by its first element or its memory layout."""
    strides = piece.variable.strides
    if strides is not None and strides[0] != piece.variable.row_numel and not piece.is_whole:
        return True
    return piece.start * piece.variable.row_numel % _VECTOR > 0


def split_problems(shares: VariableShards, facts: PlanContext) -> list[Problem]:
    """Return a problem if the optimizer cannot update split variables, or not to the bit if that is required."""
    if facts.numerics.reproducible and shares.roughly_split:
        rule = (
            f"{shares.num_servers} servers would cut {', '.join(shares.roughly_split)} within {_VECTOR} numbers that "
            "an optimizer steps together, and round differently from one device. Use strategy.servers=1, or false."
        )
        return [Problem(key="numerics.reproducible", value=True, rule=rule)]
    if not shares.split:
        return []
    parts = f"{shares.num_servers} servers would have parts of {', '.join(shares.split)}"
    return optimizer_problems(facts, parts=parts, instead="strategy.servers=1")


def step_transfers(
    model: nn.Module,
    shards: VariableShards,
    *,
    servers: Sequence[int],
    workers: Sequence[int],
    num_shards: int,
    pulls: int,
    pushes: int,
    read_width: int,
    width: int,
    lookups: Mapping[int, Lookups],
    pushes_rows: bool,
) -> tuple[Transfer, ...]:
    """Return what workers and servers exchange in a step, before a run starts.

    A worker reads the rows of each lookup in a sparse table from the servers that hold them, and pushes the rows of a
    work order's gradient; they are counted as spread evenly over the table.

    Args:
        model: the model; unchanged.
        shards: the parts of the servers.
        servers: ranks of the servers.
        workers: ranks of the tasks that compute.
        num_shards: shards of a step.
        pulls: number of times that variables are read in a step, by all workers together.
        pushes: number of gradients of a step.
        read_width: bytes of a number of a parameter that is read.
        width: bytes of a number of a gradient, or of a row that is read.
        lookups: lookups of a shard, by the index of the sparse table.
        pushes_rows: whether gradients of sparse tables are pushed as rows, not as dense ones.
    """
    normed = (module for module in model.modules() if isinstance(module, _BatchNorm))
    updated = {id(buffer) for module in normed for buffer in module.buffers(recurse=False)}
    names = {name for name, buffer in model.named_buffers() if id(buffer) in updated}
    pulled, pushed, requested, rows_read, rows_pushed = (defaultdict[int, float](float) for _ in range(5))
    for server, piece in ((server, piece) for server, pieces in enumerate(shards.pieces) for piece in pieces):
        lookup, is_trained = lookups.get(piece.index), piece.variable.kind == "param"
        if lookup is not None:
            share, values = piece.num_rows / piece.variable.num_rows, piece.variable.row_numel * width
            reads = min(lookup.reads, lookup.calls * lookup.table.num_embeddings) * num_shards * share
            requested[server] += reads * torch.int64.itemsize
            rows_read[server] += reads * values
            rows = lookup.rows(-(-num_shards // pushes)) * share
            rows_pushed[server] += rows * (row_dtype(piece.variable.num_rows).itemsize + values)
        elif piece.variable.kind != "frozen":
            pulled[server] += piece.numel * read_width if is_trained else piece.num_bytes
        if is_trained and not (pushes_rows and lookup is not None):
            pushed[server] += piece.numel * width
        elif piece.variable.name in names:
            pushed[server] += piece.numel * shards.master_dtype.itemsize

    def flows(sizes: Mapping[int, float], count: int, *, to_workers: bool = False) -> dict[tuple[int, int], float]:
        each = {
            (worker, servers[index]): size * count / len(workers)
            for index, size in sizes.items()
            for worker in workers
            if size
        }
        return {pair[::-1]: size for pair, size in each.items()} if to_workers else each

    per_worker, back = -(-pushes // len(workers)), flows(pulled, pulls, to_workers=True)
    transfers = [
        Transfer(what="variables", how="pull", flows=back, messages=2),
        Transfer(what="gradients", how="push", flows=flows(pushed, pushes), messages=2 * per_worker),
    ]
    if lookups:
        calls = 2 * sum(lookup.calls for lookup in lookups.values()) * -(-num_shards // len(workers))
        both, what = flows(requested, 1) | flows(rows_read, 1, to_workers=True), "rows of sparse tables"
        transfers.append(Transfer(what=what, how="pull", flows=both, messages=calls, note=AT_MOST))
        if pushes_rows:
            pushed_flows, what = flows(rows_pushed, pushes), "rows of sparse gradients"
            transfers.append(Transfer(what=what, how="push", flows=pushed_flows, messages=0, note=AT_MOST))
    return tuple(transfers)
