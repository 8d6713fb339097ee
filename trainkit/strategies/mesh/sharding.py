"""Shard every parameter of a model over ranks; a module's parameters are gathered while it computes (FSDP2)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from datetime import timedelta
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainkit.cluster.host import return_freed_memory
from trainkit.errors import Problem
from trainkit.numerics.precision import Precision, buffer_dtype, param_dtype
from trainkit.strategies.collectives import broadcast_values
from trainkit.strategies.maps.syntax import blocks_of
from trainkit.strategies.object_snapshot import cache_switch, watch_first_call
from trainkit.strategies.tensors.layouts import replace_tensors


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The number of ranks of each axis; the last axis varies fastest, so that its ranks are neighbours.

    Example:
        >>> axes = Axes(replicate=2, tensor=2)
        >>> axes.num_ranks, axes.coordinates(1), axes.coordinates(2)["replicate"]
        (4, {'replicate': 0, 'shard': 0, 'pipe': 0, 'context': 0, 'tensor': 1}, 1)
    """

    replicate: int = 1
    """Number of copies, each with its own shards."""
    shard: int = 1
    """Number of ranks that share one copy; each has its own shards."""
    pipe: int = 1
    """Number of ranks that share the blocks of one copy, each with its own stages."""
    context: int = 1
    """Number of parts of each sequence."""
    tensor: int = 1
    """Number of parts of each layer."""

    @property
    def ranks_a_replica(self) -> int:
        """The ranks that compute a shard of a step together, which are neighbours."""
        return self.pipe * self.context * self.tensor

    @property
    def num_ranks(self) -> int:
        """Product of the axes."""
        return prod(astuple(self))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis -> the position of a rank on it."""
        positions: dict[str, int] = {}
        for axis in reversed(fields(self)):
            rank, positions[axis.name] = divmod(rank, getattr(self, axis.name))
        return dict(reversed(positions.items()))

    def stage_of(self, rank: int) -> int:
        """Return the position of a rank along `pipe`."""
        return self.coordinates(rank)["pipe"]

    def summed_with(self, axis: str) -> tuple[str, ...]:
        """Return the axes of several ranks over which gradients are summed with those of `replicate` or `shard`.

        Ranks along `context` have parts of each sample: gradients are summed over them where they are cut, along
        `shard`; or else with the copies.

        Example:
            >>> Axes(replicate=2, shard=2, context=2).summed_with("shard"), Axes(context=2).summed_with("replicate")
            (('shard', 'context'), ('context',))
        """
        with_context = axis == ("shard" if self.shard > 1 else "replicate")
        return tuple(name for name in (axis, *("context",) * with_context) if getattr(self, name) > 1)

    def group_of_first(self, *along: str) -> tuple[int, ...]:
        """Return the ranks that differ from the first one on some axes only, and the first one.

        Example:
            >>> Axes(replicate=2, shard=3).group_of_first("replicate")
            (0, 3)
        """
        others = self.coordinates(0).keys() - {*along}
        return tuple(rank for rank in range(self.num_ranks) if not any(self.coordinates(rank)[axis] for axis in others))

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
        joined = [names for axis in ("replicate", "shard") if (names := self.summed_with(axis))]
        for names in [*zip(used, strict=True), *joined]:  # torch gives groups of some ranks its default timeout
            group = mesh[names]._flatten().get_group()  # noqa: SLF001 - no public function joins axes
            group.set_timeout(timedelta(seconds=timeout_s))
        return mesh


_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, so that no hook could gather them."""


def blocks_of_model(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a map places, by canonical name: elements of lists and sequences, else top-level children.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> list(blocks_of_model(model))
        ['0', '2']
    """
    wholes = {unit.name: unit.entries[0] for unit in blocks_of(model) if len(unit.entries) == 1 and unit.tensor is None}
    called = {name: module for name, module in wholes.items() if not isinstance(module, _UNCALLED)}
    return {name: module for name, module in called.items() if any(True for _ in module.parameters())}


def modules_of_classes(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules below the model whose class has one of these names, including nested ones."""
    classes = set(names)
    return {name: module for name, module in model.named_modules() if name and type(module).__name__ in classes}


def without_shared(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that share no parameter with the rest of the model, which keeps the shared ones."""
    owners = Counter(
        id(param)
        for module in model.modules()
        for param in module._parameters.values()  # noqa: SLF001 - own ones only
        if param is not None
    )
    shared = {param_id for param_id, count in owners.items() if count > 1}
    return {name: module for name, module in units.items() if not _reaches_out(module, shared, owners)}


def _reaches_out(module: nn.Module, shared: set[int], owners: Counter[int]) -> bool:
    inside = Counter(
        id(param)
        for inner in module.modules()
        for param in inner._parameters.values()  # noqa: SLF001
        if id(param) in shared
    )
    return any(count < owners[param_id] for param_id, count in inside.items())


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The way in which parameters are sharded and gathered."""

    mesh: DeviceMesh
    """One dim: the ranks over which parameters are sharded."""
    device: torch.device
    precision: Precision
    reshard_after_forward: bool = True
    """Whether a module frees its gathered parameters between forward and backward."""
    offload: bool = False
    """Whether shards are kept in the memory of the host."""


def fully_sharded(
    model: nn.Module, units: Iterable[nn.Module], sharding: Sharding, *, is_stage: bool = False
) -> nn.Module:
    """Shard the parameters of a model; collective.

    The values of the mesh's first rank are used, one module at a time: the others may have built the model without
    data, or have drawn values that no seed controls. Trainable parameters are stored in the precision's master dtype
    and gathered in its model dtype; gradients are summed in the master dtype.

    Args:
        model: the model, on the CPU or the device, in any dtype; without data on any rank but the mesh's first.
        units: modules that are gathered separately, inner ones first; the rest of the model is one more unit.
        sharding: the settings.
        is_stage: whether it is a stage of a model, which has no inputs of its own.
    """
    precision, model_dtype = sharding.precision, sharding.precision.model_dtype
    # batch normalisation is gathered in a dtype of its own
    apart = [module for module in model.modules() if param_dtype(module, model_dtype) is not model_dtype]
    units = dict.fromkeys([*(module for module in apart if module is not model and list(module.parameters())), *units])
    if sharding.device.type == "cpu":
        return_freed_memory()
    offload = CPUOffloadPolicy() if sharding.offload else OffloadPolicy()
    names = {module: name for name, module in model.named_modules()}
    otherwise = "use strategy=mirrored" if (switch := cache_switch(model)) is None else f"use {switch}"
    # A step changes no output in place: that a unit returns a view is no reason to warn at every forward pass.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor")
    for module in [*units, model]:
        _move_and_cast(module, sharding, precision)
        policy, dtype = MixedPrecisionPolicy(cast_forward_inputs=False), param_dtype(module, model_dtype)
        if dtype is not precision.master_dtype:  # autocast casts by itself
            policy = replace(policy, param_dtype=dtype, reduce_dtype=precision.master_dtype)
        fully_shard(
            module,
            mesh=sharding.mesh,
            reshard_after_forward=sharding.reshard_after_forward and module is not model,  # backward starts with it
            mp_policy=policy,
            offload_policy=offload,
        )
        if module is not model:
            because = "and FSDP gives each block copies of lists, dicts and dataclasses"
            watch_first_call(module, names[module], because, otherwise=otherwise)
    if sharding.reshard_after_forward:
        gather_in_order(model, prefetches="gloo" not in dist.get_backend())
    model.register_forward_hook(_free_after_evaluation, always_call=True)
    for module in sharded_units(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the only reduction that gloo supports
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
            module.unshard()  # the first gather moves uneven shards to other memory, where no update would reach them
            module.reshard()
    if not is_stage:
        precision.accept_floats(model)
    return model


def _free_after_evaluation(model: nn.Module, *_: object) -> None:
    """Reshard parameters after a forward pass without backward, because averages may replace the shards in between."""
    if not torch.is_grad_enabled():
        gathers_anew(model)


def gather_in_order(model: nn.Module, *, prefetches: bool) -> None:
    """Gather each module once in forward and once in backward, as the first forward pass calls them.

    The last module that is called stays gathered between forward and backward, like the rest of the model, because
    backward starts with both.

    Args:
        model: the sharded model, including its separately gathered modules.
        prefetches: whether each module begins the gather of the next one, in either direction. Gathers of gloo run
            before the next operation, and would only hold memory earlier.
    """
    called: list[Any] = []

    def before(module: nn.Module, _args: object) -> None:
        called.append(module)

    def after(*_: object) -> None:
        for handle in handles:
            handle.remove()
        if called and len(set(called)) == len(called):  # a module that is called twice has no unique position
            called[-1].set_reshard_after_forward(False, recurse=False)
            if prefetches:
                _prefetch(model, called)

    modules = [module for module in sharded_units(model) if module is not model]
    handles = [module.register_forward_pre_hook(before) for module in modules]
    handles.append(model.register_forward_hook(after))


def _prefetch(model: Any, order: list[Any]) -> None:
    """Let each module begin the gather of the one after it in forward, and of the one before it in backward."""
    for module, after in pairwise([model, *order]):
        module.set_modules_to_forward_prefetch([after])
    for module, before in pairwise([model, *reversed(order[:-1])]):
        module.set_modules_to_backward_prefetch([before])
    if order[1:]:
        order[-1].set_modules_to_backward_prefetch([order[-2]])


def reduces_when(model: nn.Module, is_last: bool) -> None:
    """Set whether the next backward pass exchanges gradients, or accumulates them for a later one that will."""
    for module in sharded_units(model):
        module.set_requires_gradient_sync(is_last, recurse=False)


def gathers_anew(model: nn.Module) -> None:
    """Reshard all parameters, because the shards were replaced."""
    for module in sharded_units(model):
        module.reshard()


def sharded_units(model: nn.Module) -> list[Any]:
    """Return the modules that are gathered separately, and the model."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@torch.no_grad()
def _move_and_cast(module: nn.Module, sharding: Sharding, precision: Precision) -> None:
    """Move parameters that are not sharded yet to the device, in their stored dtype, with the first rank's values."""
    device, model_dtype = sharding.device, param_dtype(module, precision.model_dtype)
    group = sharding.mesh.get_group()
    replace_tensors(module, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for param in module.parameters():
        if not isinstance(param, DTensor):
            dtype = precision.master_dtype if param.requires_grad else model_dtype
            param.data = param.data.to(device, dtype if param.is_floating_point() else param.dtype).contiguous()
            broadcast_values(param.data, group)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():  # noqa: SLF001 - buffers are replaced by new tensors
            if buffer is not None and not isinstance(buffer, DTensor):
                dtype = buffer_dtype(owner, buffer, precision.model_dtype)
                owner._buffers[name] = moved = buffer.to(device, dtype)  # noqa: SLF001
                broadcast_values(moved, group)
