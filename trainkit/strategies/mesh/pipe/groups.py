"""The ranks that hold each tensor, and the process groups that sum their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainkit.objectives.base import Collective
from trainkit.strategies.core.replica import bits_hash
from trainkit.strategies.mesh.pipe.stage_assignment import StageAssignment
from trainkit.strategies.mesh.sharding import Axes
from trainkit.strategies.tensors.layouts import FlatBuffer

_NO_HASH = torch.zeros((), dtype=torch.int64)


def holders_of(model: nn.Module, cut: StageAssignment, num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Return parameter or buffer, by canonical name -> the pipeline positions whose stages hold it.

    Most tensors are on one position. A tied one is on each stage that has one of its names; tensors that the model owns
    itself are on all.
    """
    stages: dict[int, set[int]] = {}
    for unit, stage in zip(cut.units, cut.stages, strict=True):
        for _, tensor in unit.tensors():
            stages.setdefault(id(tensor), set()).add(stage % num_ranks)
    everywhere = set(range(num_ranks))
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tuple(sorted(stages.get(id(tensor), everywhere))) for name, tensor in named}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of this rank."""

    replica: ProcessGroup
    """The ranks of the replica, in the order of the stages."""
    alike: dict[tuple[int, ...], ProcessGroup]
    """Pipeline positions -> the ranks there, in all copies, which hold the same (parts of) tensors. Only groups that
    contain this rank and have more than one rank; in an order that is the same on all ranks.
    """

    def sum(self, tensors: Sequence[Tensor | None], holders: Sequence[tuple[int, ...]]) -> list[Tensor | None]:
        """Return each tensor's sum over the positions that hold it; None if it is None on all ranks; collective."""
        sums = list(tensors)
        for places, group in self.alike.items():
            found = {at: one for at, one in enumerate(tensors) if one is not None and holders[at] == places}
            if found:
                parts = list(found.values())
                packing = FlatBuffer.like(parts, parts[0].dtype, parts[0].device)
                flat = packing.pack(parts)
                dist.all_reduce(flat, group=group)
                for at, total in zip(found, packing.views(flat), strict=True):
                    sums[at] = total
        return sums

    def gather_in_replica(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return (sum of sizes,) the vectors of the ranks of this replica, concatenated; collective.

        Args:
            tensor: (size of this rank,) vector.
            sizes: sizes of all ranks of the replica, so that they are not exchanged, which would synchronise.
        """
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.replica)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def new_groups(holders: Mapping[str, tuple[int, ...]], axes: Axes, *, rank: int, timeout_s: float) -> Groups:
    """Create the groups, in whose exchanges a rank waits for `timeout_s`; collective over all ranks."""
    timeout = timedelta(seconds=timeout_s)
    grid = torch.arange(axes.num_ranks).view(axes.replicate, axes.shard, axes.pipe, axes.tensor)
    pipelines: list[list[int]] = grid.transpose(2, 3).reshape(-1, axes.pipe).tolist()
    made = {tuple(ranks): dist.new_group(ranks, timeout=timeout) for ranks in pipelines}
    alike = {}
    # Sets of one position first, which are disjoint, then those of shared tensors, in the same order on all ranks.
    for places in sorted(set(holders.values()), key=lambda one: (len(one), one)):
        same: list[list[int]] = grid[:, :, list(places)].permute(1, 3, 0, 2).flatten(0, 1).flatten(1).tolist()
        for ranks in same if len(same[0]) > 1 else ():
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                alike[places] = group
    return Groups(replica=next(group for ranks, group in made.items() if rank in ranks), alike=alike)


def drifted(
    params: Mapping[str, Tensor], holders: Mapping[str, tuple[int, ...]], all_ranks: Collective, *, num_ranks: int
) -> str | None:
    """Return the first parameter that differs between two ranks that hold it, with the ranks; collective."""
    hashes = torch.stack([bits_hash(params[name]) if name in params else _NO_HASH for name in holders])
    rows = torch.stack(all_ranks.gather(hashes)).tolist()
    for at, (name, places) in enumerate(holders.items()):
        ranks = [rank for rank in range(len(rows)) if rank % num_ranks in places]
        wrong = [str(rank) for rank in ranks if rows[rank][at] != rows[ranks[0]][at]]
        if wrong:
            many = "" if len(wrong) == 1 else "s"
            return f"the parameter {name} differs on rank{many} {', '.join(wrong)} from rank {ranks[0]}."
    return None
