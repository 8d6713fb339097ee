"""Shard every parameter of a model over ranks; a module's parameters are gathered while it computes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainkit.numerics.deferred import lazy_init_values
from trainkit.numerics.precision import Precision
from trainkit.strategies.core.input_guard import watch_first_call
from trainkit.strategies.fsdp.sharded.malloc_trim import give_freed_memory_back
from trainkit.strategies.fsdp.sharded.meta_init import with_memory
from trainkit.strategies.fsdp.sharded.shard_geometry import ShardSlice, local_part
from trainkit.strategies.groups.collective import broadcast_values

__all__ = ["Sharding", "fully_sharded", "gathers_anew", "reduces_when"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How parameters are sharded and gathered."""

    mesh: DeviceMesh
    """One dim: sharded over its ranks. Two: replicated over the first, sharded over the second."""
    device: torch.device
    precision: Precision
    reshard_after_forward: bool = True
    """Whether a module frees its gathered parameters between forward and backward."""
    offload: bool = False
    """Whether shards are kept in the memory of the host."""


def fully_sharded(model: nn.Module, units: Iterable[nn.Module], sharding: Sharding) -> nn.Module:
    """Shard the parameters of a model; collective.

    The values of the mesh's first rank are used, one module at a time, because a model may draw values that no seed
    controls. Trainable parameters are stored in the precision's master dtype and gathered in its model dtype; gradients
    are summed in the master dtype.

    Args:
        model: on the CPU or the device, in any dtype; or without data, and then its parameters are initialised one by
            one.
        units: modules that are gathered separately, inner ones first; the rest of the model is one more.
        sharding: the settings.
    """
    precision, policy, values = sharding.precision, _policy(sharding.precision), lazy_init_values(model)
    if sharding.device.type == "cpu":
        give_freed_memory_back()
    offload = CPUOffloadPolicy() if sharding.offload else OffloadPolicy()
    names = {module: name for name, module in model.named_modules()}
    for module in [*units, model]:
        _move_and_cast(module, sharding, precision)
        fully_shard(
            module,
            mesh=sharding.mesh,
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
        if module is not model:
            watch_first_call(module, names[module], "and FSDP gives each block copies of lists, dicts and dataclasses")
    if values is not None:
        _fill(model, values, sharding)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the only one that gloo supports
    precision.accept_floats(model)
    return model


def reduces_when(model: nn.Module, is_last: bool) -> None:
    """Set whether the next backward pass exchanges gradients, or accumulates them for one that will."""
    for module in _sharded(model):
        module.set_requires_gradient_sync(is_last, recurse=False)


def gathers_anew(model: nn.Module) -> None:
    """Free all gathered parameters, because the shards were replaced."""
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> Iterable[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return FSDP's precision policy: autocast makes its own casts, so gathering casts only if the model dtype is
    lower.
    """
    if precision.model_dtype is precision.master_dtype:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=precision.model_dtype, reduce_dtype=precision.master_dtype, cast_forward_inputs=False
    )


@torch.no_grad()
def _move_and_cast(module: nn.Module, sharding: Sharding, precision: Precision) -> None:
    """Move parameters that are not sharded yet to the device, in their stored dtype and with the values of the first
    rank.
    """
    device = sharding.device
    for param in module.parameters():
        if not isinstance(param, DTensor):
            dtype = precision.master_dtype if param.requires_grad else precision.model_dtype
            target = param.device if param.is_meta else device
            param.data = param.data.to(target, dtype if param.is_floating_point() else param.dtype).contiguous()
            _broadcast_first(param.data, sharding.mesh)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():  # noqa: SLF001 - buffers are replaced by new tensors
            if buffer is not None and not isinstance(buffer, DTensor):
                dtype = precision.model_dtype if buffer.is_floating_point() else buffer.dtype
                target = buffer.device if buffer.is_meta else device
                owner._buffers[name] = moved = buffer.to(target, dtype)  # noqa: SLF001
                _broadcast_first(moved, sharding.mesh)


def _broadcast_first(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Broadcast the values of the mesh's first rank: other meshes may hold other parts of a layer."""
    for dim in range(0 if tensor.is_meta else mesh.ndim):
        broadcast_values(tensor, group=mesh.get_group(dim), group_src=0)


@torch.no_grad()
def _fill(model: nn.Module, values: Mapping[str, Tensor], sharding: Sharding) -> None:
    """Initialise a model one tensor at a time: the first rank computes the full tensor, every rank keeps its shard."""
    device, mesh = sharding.device, sharding.mesh
    with_memory(model, torch.device("cpu") if sharding.offload else device)
    for module in _sharded(model):
        module._apply(lambda tensor: tensor)  # noqa: SLF001 - makes FSDP reread its parameters
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    makes = not any(mesh.get_coordinate() or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if makes:
            whole.copy_(values[name])
        _broadcast_first(whole, mesh)
        local_part(tensor).copy_(whole[ShardSlice.of(tensor, is_first=False).region])
