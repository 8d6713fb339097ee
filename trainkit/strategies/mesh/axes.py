"""The axes along which the ranks of a run are arranged."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The number of ranks of each axis; the last axis varies fastest, so that its ranks are neighbours.

    Example:
        >>> axes = Axes(replicate=2, tensor=2)
        >>> axes.num_ranks, axes.coordinates(1), axes.coordinates(2)["replicate"]
        (4, {'replicate': 0, 'shard': 0, 'tensor': 1}, 1)
    """

    replicate: int = 1
    """Number of copies, each with its own shards."""
    shard: int = 1
    """Number of ranks that share one copy; each has its own shards."""
    tensor: int = 1
    """Number of parts of each layer."""

    @property
    def num_ranks(self) -> int:
        """Product of the axes."""
        return prod(astuple(self))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis -> the position of a rank on it."""
        found: dict[str, int] = {}
        for axis in reversed(fields(self)):
            rank, found[axis.name] = divmod(rank, getattr(self, axis.name))
        return dict(reversed(found.items()))

    def group_of_first(self, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from the first one on one axis only, and the first one.

        Example:
            >>> Axes(replicate=2, shard=3).group_of_first("replicate")
            (0, 3)
        """
        first = dict.fromkeys(self.coordinates(0), 0)
        return tuple(rank for rank in range(self.num_ranks) if {**self.coordinates(rank), axis: 0} == first)

    def problems(self, num_ranks: int) -> list[Problem]:
        """Return a problem if the product of the axes is not the number of ranks."""
        if self.num_ranks == num_ranks:
            return []
        used = [(axis.name, getattr(self, axis.name)) for axis in fields(self) if getattr(self, axis.name) > 1]
        product = " x ".join(f"{size} ({name})" for name, size in used) or "1"
        rule = f"{product} make {self.num_ranks} ranks, and the run has {num_ranks}. "
        rule += f"Use sizes whose product is {num_ranks}."
        return [Problem(key="strategy", rule=rule)]

    def mesh(self, device_type: str, *, timeout_s: float) -> DeviceMesh:
        """Return the mesh of the axes with more than one rank, by their names; collective, once per process group.

        If no axis has more than one, one axis with one rank remains. A rank waits for the others of an axis for
        `timeout_s` in an exchange.
        """
        used = {axis.name: getattr(self, axis.name) for axis in fields(self) if getattr(self, axis.name) > 1}
        used = used or {"replicate": 1}
        mesh = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
        for axis in used:  # torch gives groups of some ranks its default timeout
            mesh.get_group(axis).set_timeout(timedelta(seconds=timeout_s))
        return mesh
