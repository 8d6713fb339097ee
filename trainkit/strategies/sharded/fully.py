"""Cutting every parameter of a model over ranks, gathered module by module while it computes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainkit.numerics.precision import Precision

__all__ = ["Sharding", "fully_sharded", "gathers_anew", "reduces_when"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How parameters are cut and gathered."""

    mesh: DeviceMesh
    """One dim: cut over its ranks. Two: copies over the first, each cut over the second."""
    device: torch.device
    precision: Precision
    reshard_after_forward: bool = True
    """Whether a module lets go of what it gathered between forward and backward."""
    offload: bool = False
    """Whether parts are kept in the memory of the host."""


def fully_sharded(model: nn.Module, units: Iterable[nn.Module], sharding: Sharding) -> nn.Module:
    """Cut the parameters of a model; collective.

    The values of the mesh's first rank are taken, a module at a time: a model may draw its own where no seed reaches.
    The trainable ones are held in the precision's master dtype and gathered in its model dtype; gradients are summed in
    the master dtype.

    Args:
        model: on the CPU or the device, in any dtype.
        units: modules that are gathered by themselves, inner ones first; the rest of the model is one more.
        sharding: how.
    """
    precision, policy = sharding.precision, _policy(sharding.precision)
    offload = CPUOffloadPolicy() if sharding.offload else OffloadPolicy()
    for module in [*units, model]:
        _settle(module, sharding, precision)
        fully_shard(
            module,
            mesh=sharding.mesh,
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    precision.accept_floats(model)
    return model


def reduces_when(model: nn.Module, *, is_last: bool) -> None:
    """Say whether the coming backward pass exchanges gradients, or keeps them whole for one that will."""
    for module in _sharded(model):
        module.set_requires_gradient_sync(is_last, recurse=False)


def gathers_anew(model: nn.Module) -> None:
    """Let go of everything gathered: the parts were replaced."""
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> Iterable[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    """Autocast makes its own casts, from what is held; only parameters that are rounded as such are gathered so."""
    if precision.model_dtype is precision.master_dtype:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=precision.model_dtype, reduce_dtype=precision.master_dtype, cast_forward_inputs=False
    )


@torch.no_grad()
def _settle(module: nn.Module, sharding: Sharding, precision: Precision) -> None:
    """Bring what is not cut yet to the device, in the dtype it is held in and with the values of the first rank."""
    device = sharding.device
    for param in module.parameters():
        if not isinstance(param, DTensor):
            dtype = precision.master_dtype if param.requires_grad else precision.model_dtype
            param.data = param.data.to(device, dtype if param.is_floating_point() else param.dtype).contiguous()
            _take_over(param.data, sharding.mesh)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():  # noqa: SLF001 - a new tensor takes its place
            if buffer is not None and not isinstance(buffer, DTensor):
                dtype = precision.model_dtype if buffer.is_floating_point() else buffer.dtype
                owner._buffers[name] = settled = buffer.to(device, dtype)  # noqa: SLF001
                _take_over(settled, sharding.mesh)


def _take_over(tensor: Tensor, mesh: DeviceMesh) -> None:
    """The values of the mesh's first rank: other meshes may hold other parts of a layer."""
    for dim in range(mesh.ndim):
        dist.broadcast(tensor, group=mesh.get_group(dim), group_src=0)
