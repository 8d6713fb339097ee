"""The cut of the variables over servers: a contiguous stretch each, balanced by bytes, large variables cut by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, Final

import torch
from torch import Tensor

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext
from trainkit.strategies.fsdp.sharded.elementwise import is_elementwise
from trainkit.strategies.parameter_server.wire.variables import Variable, layout_digest
from trainkit.strategies.tensors.layouts import part_strides

__all__ = ["RowShard", "VariableShards", "split_problems"]

_SNAP: Final = 0.05
"""Of a share: how far a boundary moves to the edge of a variable; two boundaries make 10 %."""
_VECTOR: Final = 16
"""Numbers that a processor steps together, at most. A fused optimizer rounds the last few of a tensor, which fill no
vector, otherwise than the rest (FMA): a cut at a multiple leaves each where it was, and so its bits."""
_SMALL_BYTES: Final = 2**20
"""Of a share, up to which equal bits are worth more than equal sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShard:
    """What of a variable one server holds.

    Example:
        >>> import torch
        >>> table = Variable(name="w", kind="param", shape=(8, 3), dtype=torch.float32)
        >>> RowShard(place=0, variable=table, start=2, stop=5).shape
        (3, 3)
    """

    place: int
    """The number of the variable."""
    variable: Variable
    start: int
    """Its first row here."""
    stop: int
    """The row after its last one here."""

    @property
    def is_whole(self) -> bool:
        """Whether all rows are here."""
        return self.start == 0 and self.stop == self.variable.num_rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return (self.stop - self.start, *self.variable.shape[1:]) if self.variable.shape else ()

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Those of the part, whose dims lie in memory in the order of the variable's; None: contiguous."""
        return self.variable.strides if self.is_whole else part_strides(self.shape, self.variable.strides)

    @property
    def numel(self) -> int:
        """Numbers of the part."""
        return (self.stop - self.start) * self.variable.row_numel

    @property
    def num_bytes(self) -> int:
        """Bytes of the part, as the server holds it."""
        return self.numel * self.variable.dtype.itemsize

    @property
    def region(self) -> tuple[slice, ...]:
        """Its place in the whole."""
        return tuple(slice(0, size) for size in self.variable.shape) if self.is_whole else self._cut

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor, in the same memory."""
        return whole if self.is_whole else whole[self.start : self.stop]

    @property
    def _cut(self) -> tuple[slice, ...]:
        return (slice(self.start, self.stop), *(slice(0, size) for size in self.variable.shape[1:]))


class VariableShards:
    """Which rows of which variables each server holds.

    Trainable parameters, frozen ones and buffers are each cut by themselves: what a step moves is then as balanced as
    what is held. A boundary goes to the edge of a variable where one is within 5 % of a share, else between two rows;
    at most one variable a boundary is cut.

    Args:
        variables: as `variables_of` gives them.
        num_servers: servers.

    Example:
        >>> import torch
        >>> table = Variable(name="w", kind="param", shape=(1000, 64), dtype=torch.float32)
        >>> [VariableShards([table], 2).bytes_of(server) for server in (0, 1)]
        [128000, 128000]
    """

    def __init__(self, variables: Sequence[Variable], num_servers: int) -> None:
        self.variables = tuple(variables)
        self.num_servers = num_servers
        self.digest = layout_digest(self.variables, num_servers)
        trained = [variable.dtype for variable in self.variables if variable.kind == "param"]
        self.master_dtype = trained[0] if trained else torch.float32
        parts: list[list[RowShard]] = [[] for _ in range(num_servers)]
        for kind in ("param", "frozen", "buffer"):
            places = [place for place, variable in enumerate(self.variables) if variable.kind == kind]
            for server, found in enumerate(_cut(self.variables, places, num_servers)):
                parts[server].extend(found)
        self.pieces = tuple(map(tuple, parts))

    def bytes_of(self, server: int) -> int:
        """Bytes of the variables that a server holds."""
        return sum(piece.num_bytes for piece in self.pieces[server])

    @property
    def split(self) -> tuple[str, ...]:
        """The names of the trainable parameters that are cut by rows."""
        return self._names(lambda piece: not piece.is_whole)

    @property
    def roughly_split(self) -> tuple[str, ...]:
        """Those of them whose cut a fused optimizer may feel in the last bit."""
        return self._names(_is_rough)

    def _names(self, chooses: Callable[[RowShard], bool]) -> tuple[str, ...]:
        params = [piece for pieces in self.pieces for piece in pieces if piece.variable.kind == "param"]
        return tuple(dict.fromkeys(piece.variable.name for piece in params if chooses(piece)))


def _cut(variables: Sequence[Variable], places: Sequence[int], num_servers: int) -> list[list[RowShard]]:
    """What of some variables each server holds."""
    chosen = [variables[place] for place in places]
    edges = [0, *accumulate(variable.num_bytes for variable in chosen)]
    inner = [_boundary(chosen, edges, server, num_servers) for server in range(1, num_servers)]
    found = []
    for first, last in pairwise([(0, 0), *inner, (len(chosen), 0)]):
        numbers = range(first[0], last[0] + (last[1] > 0)) if first != last else ()
        found.append([_rows(chosen[number], places[number], number, first, last) for number in numbers])
    return found


def _rows(variable: Variable, place: int, number: int, first: tuple[int, int], last: tuple[int, int]) -> RowShard:
    start = first[1] if number == first[0] else 0
    stop = last[1] if number == last[0] else variable.num_rows
    return RowShard(place=place, variable=variable, start=start, stop=stop)


def _boundary(variables: Sequence[Variable], edges: Sequence[int], server: int, num_servers: int) -> tuple[int, int]:
    """(variable, row) where a server's stretch begins."""
    share = edges[-1] / num_servers
    wanted = share * server
    nearest = min(range(len(edges)), key=lambda edge: abs(edges[edge] - wanted))
    if abs(edges[nearest] - wanted) <= _SNAP * share:
        return nearest, 0
    number = next(place for place in range(len(variables)) if edges[place + 1] > wanted)
    variable = variables[number]
    together = _VECTOR // gcd(_VECTOR, variable.row_numel)
    if together * variable.row_bytes > _SNAP * share and share > _SMALL_BYTES:
        together = 1
    row = round((wanted - edges[number]) / (variable.row_bytes * together)) * together
    return (number, row) if row < variable.num_rows else (number + 1, 0)


def _is_rough(piece: RowShard) -> bool:
    """Whether another number of servers would round alike no more: by where the piece begins, or since its rows are
    no stretch of the variable's memory.
    """
    strides = piece.variable.strides
    if strides is not None and strides[0] != piece.variable.row_numel and not piece.is_whole:
        return True
    return piece.start * piece.variable.row_numel % _VECTOR > 0


def split_problems(shares: VariableShards, facts: PlanContext) -> list[Problem]:
    """Whether the run's optimizer can step parts of variables, where some are cut, and to the bit where it must.

    Args:
        shares: the cut.
        facts: the optimizer and the numbers settings.
    """
    kind: Any = facts.optimizer
    if facts.numerics.reproducible and shares.roughly_split:
        rule = (
            f"{shares.num_servers} servers would cut {', '.join(shares.roughly_split)} within {_VECTOR} numbers that "
            "an optimizer steps together, and round otherwise than one device. Use strategy.servers=1, or false."
        )
        return [Problem(key="numerics.reproducible", value=True, rule=rule)]
    if kind is None or is_elementwise(kind) or not shares.split:
        return []
    rule = (
        f"{kind.__name__} looks at whole parameters, and {shares.num_servers} servers would have parts of "
        f"{', '.join(shares.split)}. Use an elementwise optimizer (torch.optim.AdamW), or strategy.servers=1."
    )
    return [Problem(key="optimizer._target_", value=f"{kind.__module__}.{kind.__qualname__}", rule=rule)]
