"""Memory of a run on each of its devices, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError, Problem, TrainkitError
from trainkit.run.planning.build import build_model, make_optimizer
from trainkit.run.planning.plan import RunPlan
from trainkit.trainer.checkpoint import bytes_needed

__all__ = ["Memory", "checkpoint_bytes", "memory_of", "meta_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on each device that the model itself decides; activations come on top."""

    num_params: int
    """Parameters, trainable or not."""
    parameter_bytes: int
    """Parameters, and their masters where those are apart."""
    buffer_bytes: int
    """Buffers of the model."""
    gradient_bytes: int
    """Gradients as backward leaves them."""
    exchange_bytes: int
    """Copies of the gradients that the exchange or the order of summation needs at its peak."""
    optimizer_bytes: int | None
    """State of the optimizer; None where it cannot be found out without allocating it."""
    gathered_bytes: int = 0
    """Parameters and gradients that are here for a while, at the peak, because ranks hold parts of the model."""

    @property
    def total_bytes(self) -> int:
        """All that is known."""
        known = (self.parameter_bytes, self.buffer_bytes, self.gradient_bytes, self.exchange_bytes, self.gathered_bytes)
        return sum(known) + (self.optimizer_bytes or 0)


def meta_model(plan: RunPlan) -> nn.Module:
    """The model without its numbers (on torch's `meta` device); with them where it cannot be built so.

    Raises:
        ConfigError: it has a parameter whose bytes no 64 bits count.
    """
    try:
        with torch.device("meta"):
            return build_model(plan.cfg)
    except TrainkitError:
        raise
    except Exception as error:  # noqa: BLE001 - a constructor that looks at its numbers may fail in any way
        if "Storage size calculation overflowed" in str(error):
            rule = f"has a parameter that no memory holds: {str(error).splitlines()[0]}. Use smaller sizes."
            raise ConfigError([Problem(key="model", rule=rule)]) from None
        return build_model(plan.cfg)


def memory_of(plan: RunPlan, model: nn.Module) -> Memory:
    """Count what a device of this run will hold.

    Args:
        plan: the run.
        model: from `meta_model`.
    """
    precision = plan.components.precision
    width, master_width = precision.model_dtype.itemsize, precision.master_dtype.itemsize
    held = plan.components.strategy.held(model, plan.facts)
    trained = sum(held.get(name, 0) for name, param in model.named_parameters() if param.requires_grad)
    count = sum(held.values())
    apart = master_width * trained if precision.model_dtype is not precision.master_dtype else 0
    copies = plan.components.strategy.gradient_copies(plan.components.numerics, plan.num_replicas)
    return Memory(
        num_params=sum(param.numel() for param in model.parameters()),
        parameter_bytes=count * width + apart,
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        gradient_bytes=trained * width + apart,
        exchange_bytes=copies * trained * master_width,
        optimizer_bytes=_optimizer_bytes(plan, model, held, master_width),
        gathered_bytes=plan.components.strategy.gathered(model, plan.facts) * master_width,
    )


def checkpoint_bytes(plan: RunPlan, model: nn.Module) -> int:
    """Return the bytes of a checkpoint of this run; without the optimizer's state where nobody knows it beforehand.

    Args:
        plan: the run.
        model: from `meta_model`.
    """
    width = plan.components.precision.master_dtype.itemsize
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    kept = _optimizer_bytes(plan, model, sizes, width) or 0
    return bytes_needed(model.buffers()) + sum(sizes.values()) * width + kept


def _optimizer_bytes(plan: RunPlan, model: nn.Module, held: Mapping[str, int], width: int) -> int | None:
    """Let the optimizer take one step on parameters without numbers, and count what it keeps."""
    params = {
        name: nn.Parameter(_abstract(param, held[name]))
        for name, param in model.named_parameters()
        if param.requires_grad and held.get(name)
    }
    settings = {key: False for key in ("fused", "foreach") if key in plan.cfg.optimizer}
    try:
        optimizer = make_optimizer(plan.cfg, model, **settings)(params)
        for param in params.values():
            param.grad = torch.empty_like(param)
        optimizer.step()
    except TrainkitError:
        raise
    except Exception:  # noqa: BLE001 - any optimizer may want real numbers, in its own way
        return None
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(value.numel() * (width if value.is_floating_point() else value.element_size()) for value in kept)


def _abstract(param: Tensor, size: int) -> Tensor:
    """What a device holds of a parameter, without numbers: of one that is cut, so many elements in a row."""
    return torch.empty_like(param, device="meta") if size == param.numel() else torch.empty(size, device="meta")
