"""A rank's parts of a replica whose layers are sharded, and its position on the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainkit.numerics.hashing import hash64
from trainkit.strategies.core.placement import SingleDevicePlacement
from trainkit.strategies.core.replica_check import bits_hash
from trainkit.strategies.core.sharded.replica import ShardedReplica, ShardSlice
from trainkit.strategies.groups.collective import broadcast_values
from trainkit.strategies.groups.mesh import Axes


@dataclass(frozen=True, kw_only=True)
class OnMesh(SingleDevicePlacement):
    """A rank's device and its place on the mesh."""

    axes: Axes = field(default_factory=Axes)
    """How the ranks are arranged."""
    rank: int = 0
    """This rank."""
    mesh: DeviceMesh | None = None
    """The axes of more than one rank; None if there is no other rank."""

    @property
    def places(self) -> dict[str, int]:
        """Axis -> this rank's place on it."""
        return self.axes.coordinates(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ only on one axis; None if this is the only one."""
        return None if self.mesh is None or getattr(self.axes, axis) == 1 else self.mesh.get_group(axis)


def within(outer: ShardSlice, part: Tensor) -> ShardSlice:
    """Return the slice of a part of a part in the full tensor.

    Args:
        outer: the slice of the layer's part.
        part: a DTensor, sharded over the replicas, or a plain tensor, which is the whole part.
    """
    inner = ShardSlice.of(part, is_first=outer.is_written)
    offset = tuple(start + more for start, more in zip(outer.offset, inner.offset, strict=True))
    return ShardSlice(offset=offset, size=inner.size, shape=outer.shape, is_written=inner.is_written)


@torch.no_grad()
def begin_alike(replica: ShardedReplica, place: OnMesh) -> None:
    """Broadcast the whole tensors of the first rank, and the parts of the first replica; collective.

    A model may draw numbers that no seed controls. Parts that are sharded over replicas are equal already.
    """
    if place.mesh is None or place.axes.shard > 1:
        return
    copies = place.group("replicate")
    rounded = replica.params if replica.masters_apart else {}
    for name, param in (*{**replica.owners, **replica.masters}.items(), *rounded.items()):
        cut = replica.cuts[name]
        if cut.size == cut.shape:
            broadcast_values(param, src=0)
        elif copies is not None:
            broadcast_values(param, group=copies, group_src=0)
    for buffer in replica.model.buffers():
        broadcast_values(buffer, src=0)


def drifted_part(replica: ShardedReplica) -> str | None:
    """Return the first parameter of which two ranks hold the same part in different bits; collective."""
    names = list(replica.parts)
    rows = [
        [int(bits_hash(part)), hash64(*replica.cuts[name].offset) >> 1]  # a signed number holds 63 bits
        for name, part in replica.parts.items()
    ]
    found = torch.stack(replica.all_ranks.gather(torch.tensor(rows).unsqueeze(0))).squeeze(1).tolist()
    for at, name in enumerate(names):
        firsts: dict[int, int] = {}
        for rank, row in enumerate(found):
            bits, part = row[at]
            first = firsts.setdefault(part, rank)
            if found[first][at][0] != bits:
                return (
                    f"the parameter {name} differs on rank {rank} from rank {first}, which holds the same part of it."
                )
    return None
