"""The stages that a rank keeps of a model: whole, cut along `tensor`, or sharded along `shard`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.numerics.precision import Precision, buffer_dtype
from trainkit.strategies.collectives import broadcast_values
from trainkit.strategies.core.replica import PlacedModel
from trainkit.strategies.core.synchronous import move_and_cast
from trainkit.strategies.mesh.layout import Layout, OnMesh
from trainkit.strategies.mesh.pipe.stage_assignment import StageAssignment
from trainkit.strategies.mesh.pipe.stage_module import Blocks
from trainkit.strategies.mesh.sharding import Axes, Sharding, fully_sharded
from trainkit.strategies.mesh.step import ShardSlice
from trainkit.strategies.mesh.tensor import DrawWatch, Exchange, cut_parameters, exchange_activations
from trainkit.strategies.tensors.layouts import Placement, local_part, make_dense, replace_tensors


@dataclass(frozen=True, kw_only=True)
class StageParams(Placement):
    """The tensors of some stages on one device; all others are moved to torch's meta device."""

    device: torch.device
    names: frozenset[str]
    """Canonical names of the parameters and buffers that are kept."""

    def device_of(self, name: str) -> torch.device:
        """Return the device of a tensor."""
        return self.device if name in self.names else torch.device("meta")

    def receive(self, model: nn.Module) -> None:
        """Take the values of rank 0 for the tensors that are kept, and release the others, one by one; collective."""
        name_of = {id(tensor): name for name, tensor in _named(model)}

        def received(tensor: Tensor) -> Tensor:
            values = torch.empty_like(tensor, device=self.device) if tensor.is_meta else tensor.to(self.device)
            broadcast_values(values)
            return values if name_of[id(tensor)] in self.names else torch.empty_like(values, device="meta")

        replace_tensors(model, received)

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


@dataclass(kw_only=True)
class HeldStages:
    """Keeps the stages of one rank."""

    cut: StageAssignment
    """The assignment of all stages."""
    axes: Axes
    rank: int
    """This rank."""
    holders: dict[str, tuple[int, ...]]
    """Parameter or buffer, by canonical name -> the positions along `pipe` that hold it."""
    layout: Layout
    place: OnMesh | None
    """The place of this rank on a mesh; None: neither `shard` nor `tensor` has several ranks."""
    blocks: dict[int, Blocks] = field(default_factory=dict)
    """Stage -> its modules."""
    cuts: dict[str, ShardSlice] = field(default_factory=dict)
    """The slice of each parameter of these stages; empty if they are whole."""
    traced: nn.Module | None = None
    """The model for passes without data, whole and on the meta device; None: the model itself."""

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """The ranks of `shard`; None: this one alone."""
        return None if self.place is None else self.place.group("shard")

    @property
    def position(self) -> int:
        """The place of this rank along `pipe`."""
        return self.axes.coordinates(self.rank)["pipe"]

    def params(self, device: torch.device) -> StageParams:
        """Return the tensors that this rank keeps, on its device."""
        names = frozenset(name for name, places in self.holders.items() if self.position in places)
        return StageParams(device=device, names=names)

    def move(self, model: nn.Module, precision: Precision, placement: Placement) -> PlacedModel:
        """Keep the tensors of the stages, and copies of higher precision only of these; collective."""
        assert isinstance(placement, StageParams)
        if self.place is not None:
            self.traced = precision.adapt(_without_data(model))
        placement.receive(model)
        self.blocks = {
            stage: Blocks(model, self.cut, stage) for stage in range(self.position, self.cut.num_stages, self.axes.pipe)
        }
        held = None if self.place is None else self._cut(model, precision, placement, self.place)
        if held is None:
            held = move_and_cast(model, precision, placement)
        params = _here(held.params)
        masters = params if held.masters is held.params else _here(held.masters)
        return PlacedModel(model=held.model, params=params, masters=masters)

    def _cut(self, model: nn.Module, precision: Precision, placement: StageParams, place: OnMesh) -> PlacedModel:
        """Cut layers along `tensor`, then shard what is left along `shard`; collective."""
        fit, places, layout = self.layout.fitted(model), place.places, self.layout
        is_first = places["replicate"] == 0
        outer = cut_parameters(model, fit, place=places["tensor"], degree=layout.axes.tensor, is_first=is_first)
        held = self._sharded(model, precision, placement, place) if layout.gathers else None
        if held is None:
            held = move_and_cast(model, precision, placement)
        if fit.chosen:
            exchange = Exchange(place.mesh["tensor"])
            exchange_activations(model, fit, exchange)
            DrawWatch(model, exchange, [placement.device])
        for name, param in model.named_parameters():
            if name in placement.names:
                found = place.within(outer[name], param)
                is_home = self.holders[name][0] == self.position
                self.cuts[name] = replace(found, is_written=found.is_written and is_home)
        return held

    def _sharded(self, model: nn.Module, precision: Precision, placement: StageParams, place: OnMesh) -> PlacedModel:
        make_dense(model)
        layout = self.layout
        sharding = Sharding(
            mesh=place.mesh["shard"],
            device=placement.device,
            precision=precision,
            reshard_after_forward=layout.reshard_after_forward,
        )
        before = {id(param): list[tuple[nn.Module, str]]() for param in model.parameters()}
        for owner, leaf, param in _owned(model):
            before[id(param)].append((owner, leaf))
        inside = {id(one) for root in self.blocks.values() for one in root.modules()}
        for root in self.blocks.values():
            fully_sharded(root, layout.units_in(model, root), sharding, is_stage=True)
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
            if param.requires_grad and name in placement.names
        }
        return PlacedModel(model=model, params=parts, masters=parts)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in model.modules():
        for leaf, param in owner._parameters.items():  # noqa: SLF001
            if param is not None:
                yield owner, leaf, param


def _without_data(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device."""
    empty: Callable[[Tensor], Tensor] = lambda one: torch.empty_like(one, device="meta")  # noqa: E731
    known: dict[int, Tensor] = {}
    for _, tensor in _named(model):
        is_param = isinstance(tensor, nn.Parameter)
        known[id(tensor)] = nn.Parameter(empty(tensor), tensor.requires_grad) if is_param else empty(tensor)
    return copy.deepcopy(model, known)


def _here(params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: param for name, param in params.items() if not param.is_meta}
