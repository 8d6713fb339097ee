"""The stages that a rank keeps of a model: whole, cut along `tensor`, or sharded along `shard`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainkit.numerics.precision import Precision, buffer_dtype
from trainkit.numerics.randomness import draws_nothing
from trainkit.strategies.collectives import broadcast_values
from trainkit.strategies.core.replica import PlacedModel
from trainkit.strategies.core.synchronous import move_and_cast
from trainkit.strategies.mesh.context import SequenceCut, cut_activations
from trainkit.strategies.mesh.layout import Layout, MeshPlace
from trainkit.strategies.mesh.pipe.forward import Blocks
from trainkit.strategies.mesh.pipe.stages import StageAssignment
from trainkit.strategies.mesh.sharding import Axes, fully_sharded
from trainkit.strategies.mesh.tensor import cut_parameters
from trainkit.strategies.tensor_shards import ShardSlice
from trainkit.strategies.tensors.layouts import FlatBuffer, Placement, local_part, make_dense, replace_tensors


@dataclass(frozen=True, kw_only=True)
class RankStages(MeshPlace):
    """The place of a rank, and the tensors that it keeps there; all others are moved to torch's meta device."""

    layout: Layout
    cut: StageAssignment
    """The assignment of all stages."""
    holders: dict[str, tuple[int, ...]]
    """Parameter or buffer, by canonical name -> the positions along `pipe` that hold it."""
    blocks: dict[int, Blocks] = field(default_factory=dict)
    """Stage -> its modules, for the stages of this rank."""
    cuts: dict[str, ShardSlice] = field(default_factory=dict)
    """The slice of each parameter of these stages."""
    sequences: SequenceCut | None = None
    """The stretches of this rank; None: sequences are whole."""

    @property
    def position(self) -> int:
        """The place of this rank along `pipe`; stage i is at i modulo the ranks there."""
        return self.coordinates["pipe"]

    def device_of(self, name: str) -> torch.device:
        """Return the device of a tensor."""
        return self.device if self.position in self.holders[name] else torch.device("meta")

    def move(self, model: nn.Module) -> nn.Module:
        """Move the kept tensors to the device."""
        for param in model.parameters():
            if not param.is_meta:
                param.data = param.data.to(self.device)  # the same Parameter object: tied tensors stay tied
        for module in model.modules():
            for leaf, buffer in module._buffers.items():  # noqa: SLF001
                if buffer is not None and not buffer.is_meta:
                    module._buffers[leaf] = buffer.to(self.device)  # noqa: SLF001
        return model

    def keep(self, model: nn.Module, precision: Precision, _placement: Placement) -> PlacedModel:
        """Keep the tensors of the stages, with the values of rank 0: cut along `tensor`, then sharded along `shard`;
        copies of higher precision only of these. Collective.
        """
        name_of = {id(tensor): name for name, tensor in _named(model)}

        def received(tensor: Tensor) -> Tensor:
            values = torch.empty_like(tensor, device=self.device) if tensor.is_meta else tensor.to(self.device)
            broadcast_values(values)
            return values.to(self.device_of(name_of[id(tensor)]))

        replace_tensors(model, received)  # and release the others, one by one
        cut, axes, coordinates = self.cut, self.axes, self.coordinates
        for stage in range(self.position, cut.num_stages, axes.pipe):
            self.blocks[stage] = Blocks(model, cut.units, cut.members(stage))
        fit, draws = self.layout.fitted(model), not draws_nothing(model)
        outer = cut_parameters(model, fit, rank=coordinates["tensor"], degree=axes.tensor, is_first=self.is_first_copy)
        placed = self._sharded(model, precision) if self.layout.gathers else move_and_cast(model, precision, self)
        cut_activations(model, fit, self, self.sequences, draws=draws, passes_of=[*self.blocks.values()])
        for name, param in model.named_parameters():
            if self.position in self.holders[name]:
                part = self.within(outer[name], param)
                is_home = self.holders[name][0] == self.position
                self.cuts[name] = replace(part, is_written=part.is_written and is_home)
        return placed.restricted(self.cuts)

    def _sharded(self, model: nn.Module, precision: Precision) -> PlacedModel:
        make_dense(model)
        before = {id(param): list[tuple[nn.Module, str]]() for param in model.parameters()}
        for owner in model.modules():
            for leaf, param in owner._parameters.items():  # noqa: SLF001
                if param is not None:
                    before[id(param)].append((owner, leaf))
        inside = {id(module) for root in self.blocks.values() for module in root.modules()}
        for root in self.blocks.values():
            sharding = self.layout.sharding(self, precision)
            fully_sharded(root, self.layout.units_in(model, root), sharding, is_stage=True)
        for places in before.values():  # other names of a tied parameter, in blocks that are not here
            new = next((owner._parameters[leaf] for owner, leaf in places if id(owner) in inside), None)  # noqa: SLF001
            for owner, leaf in places if new is not None else ():
                owner._parameters[leaf] = new  # noqa: SLF001
        for owner in model.modules():
            for leaf, buffer in owner._buffers.items() if id(owner) not in inside else ():  # noqa: SLF001
                if buffer is not None:
                    owner._buffers[leaf] = buffer.to(buffer_dtype(owner, buffer, precision.model_dtype))  # noqa: SLF001
        precision.accept_floats(model)
        parts = {
            name: nn.Parameter(local_part(param.detach()))
            for name, param in model.named_parameters()
            if param.requires_grad and self.position in self.holders[name]
        }
        return PlacedModel(model=model, params=parts, masters=parts)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def without_data(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device."""
    empty: Callable[[Tensor], Tensor] = lambda tensor: torch.empty_like(tensor, device="meta")  # noqa: E731
    memo: dict[int, Tensor] = {}
    for _, tensor in _named(model):
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty(tensor), tensor.requires_grad) if is_param else empty(tensor)
    return copy.deepcopy(model, memo)


Alike = dict[tuple[int, ...], ProcessGroup]
"""Positions along `pipe` -> the ranks there, in all copies, which hold the same (parts of) tensors. Only groups that
contain this rank and have more than one rank; in an order that is the same on all ranks.
"""


def groups_alike(holders: Sequence[tuple[int, ...]], axes: Axes, *, rank: int, timeout_s: float) -> Alike:
    """Create the groups of the positions in `holders`, in whose exchanges a rank waits for `timeout_s`; collective
    over all ranks.
    """
    grid = torch.arange(axes.num_ranks).view(astuple(axes)).permute(1, 4, 0, 3, 2)
    if axes.shard > 1:  # the backward pass sums over `context` and `shard`
        grid = grid.permute(0, 3, 1, 2, 4).reshape(-1, axes.tensor, axes.replicate, 1, axes.pipe)
    alike: Alike = {}
    # Sets of one position first, which are disjoint, then those of shared tensors, in the same order on all ranks.
    for places in sorted(set(holders), key=lambda places: (len(places), places)):
        rank_lists: list[list[int]] = grid[..., list(places)].flatten(0, 1).flatten(1).tolist()
        for ranks in rank_lists if len(rank_lists[0]) > 1 else ():
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if rank in ranks:
                alike[places] = group
    return alike


def sum_alike(
    tensors: Sequence[Tensor | None], holders: Sequence[tuple[int, ...]], alike: Alike
) -> list[Tensor | None]:
    """Return each tensor's sum over the positions that hold it; None if it is None on all ranks; collective."""
    sums = list(tensors)
    for places, group in alike.items():
        chosen = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None and holders[i] == places}
        if chosen:
            parts = list(chosen.values())
            packing = FlatBuffer.like(parts, parts[0].dtype, parts[0].device)
            flat = packing.pack(parts)
            dist.all_reduce(flat, group=group)
            for index, total in zip(chosen, packing.views(flat), strict=True):
                sums[index] = total
    return sums
