"""The way in which ranks of one mesh hold a model: its axes, the place of a rank on them, and the cuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainkit.numerics.precision import Precision
from trainkit.strategies.mesh.sharding import Axes, Sharding, blocks_of_model, modules_of_classes, without_shared
from trainkit.strategies.mesh.tensor_plan import MatchedPlan, match_plan
from trainkit.strategies.tensor_shards import ShardSlice
from trainkit.strategies.tensors.layouts import SingleDevicePlacement

Wrap = Literal["blocks"] | tuple[str, ...]
TensorPlan = Mapping[str, str] | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The way in which a strategy cuts a model over its ranks."""

    axes: Axes
    plan: TensorPlan = "auto"
    """Modules and their styles along `tensor`."""
    wrap: Wrap = "blocks"
    """Unit of the gathers along `shard`."""
    reshard_after_forward: bool = True
    """Whether units free their gathered parameters between forward and backward."""
    sync: Literal["each", "last"] = "each"
    """Whether gradients are summed after each shard of a step, or after the last one of a rank."""
    offload: bool = False
    """Whether sharded parameters are kept in the memory of the host."""
    tensor_key: str = "tensor"
    """The key of `strategy` that sets the ranks along `tensor`, for messages."""
    gathers_alone: bool = False
    """Whether a group of one rank gathers its parameters as well."""

    @property
    def gathers(self) -> bool:
        """Whether parameters are sharded, and gathered to compute."""
        return self.axes.shard > 1 or self.gathers_alone

    def fitted(self, model: nn.Module) -> MatchedPlan:
        """Return the modules that are cut along `tensor`."""
        if self.axes.tensor == 1:
            return MatchedPlan()
        fit = match_plan(model, self.plan, self.axes.tensor)
        keys = {"strategy.tensor": f"strategy.{self.tensor_key}"}
        problems = [replace(problem, key=keys.get(problem.key, problem.key)) for problem in fit.problems]
        return replace(fit, problems=problems)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that are gathered separately, inner ones first."""
        return self.units_in(model, model)

    def units_in(self, model: nn.Module, stage: nn.Module) -> list[nn.Module]:
        """Return the modules of a stage of a model that are gathered separately, inner ones first."""
        modules = blocks_of_model(model) if self.wrap == "blocks" else modules_of_classes(model, self.wrap)
        in_stage = {id(module) for module in stage.modules()}
        chosen = without_shared(stage, {name: module for name, module in modules.items() if id(module) in in_stage})
        return [chosen[name] for name in sorted(chosen, key=lambda name: -name.count("."))]

    def sharding(self, place: MeshPlace, precision: Precision) -> Sharding:
        """Return the way in which parameters are sharded at a place."""
        return Sharding(
            mesh=place.summing("shard") or place.mesh,
            device=place.device,
            precision=precision,
            reshard_after_forward=self.reshard_after_forward,
            offload=self.offload,
        )

    def rank_elements(self, model: nn.Module) -> dict[str, int]:
        """Return the elements of each parameter that a rank computes with, by canonical name."""
        fit = self.fitted(model)
        return {
            name: param.numel() // (self.axes.tensor if name in fit.dims else 1)
            for name, param in model.named_parameters()
        }

    def resident_elements(self, model: nn.Module) -> dict[str, int]:
        """Return the elements of each parameter that the rank with the largest part holds, by canonical name."""
        fit, resident = self.fitted(model), {}
        for name, param in model.named_parameters():
            dim, rows = fit.dims.get(name), param.shape[0] if param.dim() else 1
            local_rows = rows // self.axes.tensor if dim == 0 else rows
            row = param.numel() // max(rows, 1) // (self.axes.tensor if dim else 1)
            resident[name] = -(-local_rows // (self.axes.shard * self.axes.context if self.axes.shard > 1 else 1)) * row
        return resident

    def transient_elements(self, model: nn.Module) -> int:
        """Count the model's own tensors, two gathered units, the gradients of one, and their send buffers.

        Without `reshard_after_forward` all parameters, with `sync=last` all gradients.
        """
        if not self.gathers:
            return 0
        sizes, names = self.rank_elements(model), {id(param): name for name, param in model.named_parameters()}
        units = [sum(sizes[names[id(param)]] for param in unit.parameters()) for unit in self.units(model)]
        total, largest = sum(sizes.values()), max(units, default=0)
        rest = max(total - sum(units), 0)
        params = rest + 2 * largest if self.reshard_after_forward else total
        return params + 2 * max(largest, rest) + (total if self.sync == "last" else 0)


@dataclass(frozen=True, kw_only=True)
class MeshPlace(SingleDevicePlacement):
    """The device of a rank and its place on the mesh."""

    axes: Axes
    """The axes along which the ranks are arranged."""
    rank: int
    """This rank."""
    mesh: DeviceMesh
    """The axes of more than one rank."""

    @property
    def coordinates(self) -> dict[str, int]:
        """Axis -> the position of this rank on it."""
        return self.axes.coordinates(self.rank)

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of those with the same parts, which differ along `tensor` alone."""
        copies = self.summing("replicate")
        return copies is None or copies.get_local_rank() == 0

    def within(self, outer: ShardSlice, part: Tensor) -> ShardSlice:
        """Return the slice of the full tensor that a part of a part is.

        Args:
            outer: the slice of this rank's part of the layer.
            part: a DTensor, sharded over the ranks of `summing("shard")`, or a plain tensor, which is the whole part.
        """
        if not isinstance(part, DTensor):
            along = self.summing("shard")
            return replace(outer, is_written=outer.is_written and (along is None or along.get_local_rank() == 0))
        (placement,), count, local_rank = part.placements, part.device_mesh.size(), part.device_mesh.get_local_rank()
        assert isinstance(placement, Shard)
        offset, size, dim = list(outer.offset), list(part.shape), placement.dim
        length = -(-size[dim] // count)  # as in torch.chunk: the last parts are short, or empty
        start = min(length * local_rank, size[dim])
        offset[dim], size[dim] = offset[dim] + start, min(length, size[dim] - start)
        return replace(outer, offset=tuple(offset), size=tuple(size))

    def summing(self, axis: str) -> DeviceMesh | None:
        """Return the ranks that sum gradients along `replicate` or `shard`; None if this is the only one."""
        names = self.axes.summed_with(axis)
        return self.mesh[names]._flatten() if names else None  # noqa: SLF001 - no public function joins axes

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ only on one axis; None if this is the only one."""
        return None if getattr(self.axes, axis) == 1 else self.mesh.get_group(axis)
