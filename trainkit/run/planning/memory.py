"""Compute the memory of a run on each of its devices, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from trainkit.config.identity import run_config
from trainkit.errors import ConfigError, Problem, TrainkitError
from trainkit.files import bytes_needed, num_bytes
from trainkit.objectives.distillation import FrozenModel
from trainkit.run.planning.build import make_optimizer, named_optimizers
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import ModelMemory, NamedOptimizer
from trainkit.strategies.core.optimizer import NamedSteppers
from trainkit.trained.build import frozen_models, meta_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on each device that depend only on the model; activations are added."""

    num_params: int
    """Parameters, trainable or not."""
    parameter_bytes: int
    """Parameters, and master copies if they are separate."""
    buffer_bytes: int
    """Buffers of the model."""
    gradient_bytes: int
    """Gradients after backward."""
    exchange_bytes: int
    """Copies of the gradients that the exchange or the order of summation needs at its peak."""
    bucket_bytes: int | None = None
    """Gradients in addition to the vector that holds all of them and outlives the step; None: the vector frees the
    gradients.
    """
    optimizer_bytes: int | None
    """State of the optimizer; None if it cannot be found without allocating it."""
    gathered_bytes: int = 0
    """Parameters and gradients that are gathered temporarily, at the peak, because the model is sharded."""

    frozen_bytes: int = 0
    """Parameters and buffers of frozen models of the objective."""
    workspace_bytes: int = 0
    """The workspaces of cuBLAS."""
    staging_bytes: int = 0
    """The copy of the state on the host that is written in the background; kept from the first step to the end."""
    staged_here: bool = False
    """Whether that copy is in the memory of the device: on the CPU."""

    @property
    def total_bytes(self) -> int:
        """The sum of all known parts."""
        model = self.parameter_bytes + self.buffer_bytes + self.gathered_bytes + self.frozen_bytes
        model += self.workspace_bytes
        model += self.staging_bytes if self.staged_here else 0
        return model + self.gradient_bytes + self.exchange_bytes + (self.optimizer_bytes or 0)


def memory_of(plan: RunPlan, model: nn.Module, estimate: ModelMemory | None = None) -> Memory:
    """Compute the memory of a device of this run.

    Args:
        plan: the run.
        model: the model, possibly without data.
        estimate: the share of the model on the device; None: that of the device with the largest share.
    """
    precision = plan.components.precision
    width, master_width = precision.model_dtype.itemsize, precision.master_dtype.itemsize
    estimate = estimate or plan.components.strategy.estimate_memory(model, plan.context)
    resident = estimate.resident
    trained = sum(resident.get(name, 0) for name, param in model.named_parameters() if param.requires_grad)
    count = sum(resident.values())
    masters = master_width * trained if precision.model_dtype is not precision.master_dtype else 0
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    optimizer = _optimizer_bytes(plan, model, resident, master_width)
    bucket = None
    if estimate.bucket is not None:  # graphs of whole steps accumulate all gradients outside of the vector
        bucket = (trained if plan.cfg.compile.mode == "step" else min(estimate.bucket, trained)) * master_width
    return Memory(
        num_params=sum(param.numel() for param in model.parameters()),
        parameter_bytes=count * width + masters,
        buffer_bytes=buffers,
        gradient_bytes=trained * master_width,  # gradients of another dtype are added to these, then freed
        exchange_bytes=round(estimate.gradient_copies * trained) * master_width,
        bucket_bytes=bucket,
        optimizer_bytes=optimizer,
        gathered_bytes=estimate.transient * master_width,
        frozen_bytes=sum(_frozen_bytes(frozen, width) for _, frozen in frozen_models(plan.components.objective)),
        staging_bytes=count * master_width + buffers + (optimizer or 0) if plan.cfg.checkpoint.background else 0,
        staged_here=all(task.device == "cpu" for task in plan.tasks),
    )


def checkpoint_bytes(plan: RunPlan, model: nn.Module) -> int:
    """Return the bytes of a checkpoint of this run; without the optimizer's state if its size is unknown beforehand."""
    width = plan.components.precision.master_dtype.itemsize
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    optimizer = _optimizer_bytes(plan, model, sizes, width) or 0
    return bytes_needed(model.buffers()) + sum(sizes.values()) * width + optimizer


def model_bytes(plan: RunPlan, model: nn.Module) -> int:
    """Return the bytes of the exported model of this run."""
    width = plan.components.precision.master_dtype.itemsize
    return bytes_needed(model.buffers()) + sum(param.numel() for param in model.parameters()) * width


def _frozen_bytes(frozen: FrozenModel, width: int) -> int:
    """Count the bytes of frozen models; floating tensors take `width` bytes per element."""
    source = frozen.source
    model = source if isinstance(source, nn.Module) else meta_model(run_config(Path(source).expanduser()))
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * (width if tensor.is_floating_point() else tensor.element_size()) for tensor in tensors)


def refuse_small_host(plan: RunPlan, model: nn.Module, host_bytes: int) -> None:
    """Refuse a model that is sent from rank 0, if it cannot be built whole in the memory of a host.

    Raises:
        ConfigError: the model is larger.
    """
    needed = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    if plan.components.strategy.facts.supports_meta_init and needed > host_bytes:
        rule = f"rank 0 builds it whole: {num_bytes(needed)}, and the memory of the host is {num_bytes(host_bytes)}. "
        rule += "Use a host with more memory for rank 0, or a smaller model."
        raise ConfigError([Problem(key="model._target_", value=plan.cfg.model["_target_"], rule=rule)])


def _optimizer_bytes(plan: RunPlan, model: nn.Module, resident: Mapping[str, int], width: int) -> int | None:
    """Count the optimizer state after one step on `meta` parameters; None if the optimizer cannot run on them."""
    params = dict[str, nn.Parameter]()
    for name, param in model.named_parameters():
        if param.requires_grad and (size := resident.get(name)):  # flat if the parameter is sharded
            is_whole = size == param.numel()
            data = torch.empty_like(param, device="meta") if is_whole else torch.empty(size, device="meta")
            params[name] = nn.Parameter(data)
    try:
        make, named = optimizers_of(plan, model, {"fused": False, "foreach": False})
        optimizers = NamedSteppers.of(named, params).optimizers if named else (make(params),)
        for param in params.values():
            param.grad = torch.empty_like(param)
        for optimizer in optimizers:
            optimizer.step()
    except TrainkitError:
        raise
    except Exception:  # noqa: BLE001 - any optimizer may need real data, in its own way
        return None
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * (width if tensor.is_floating_point() else tensor.element_size()) for tensor in tensors)


def optimizers_of(
    plan: RunPlan, model: nn.Module, settings: Mapping[str, bool]
) -> tuple[Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer], tuple[NamedOptimizer, ...]]:
    """Return the maker of the optimizer of a run, and those of several ones.

    Args:
        plan: the run.
        model: the model, possibly without data.
        settings: settings that replace those of the config, if an optimizer has them.
    """
    cfg, node = plan.cfg, plan.cfg.optimizer
    present = {key: value for key, value in settings.items() if key in node}
    named = named_optimizers(cfg, plan.optimizers, model, settings) if plan.optimizers else ()
    return make_optimizer(replace(cfg, optimizer={**node, **present}), model), named
