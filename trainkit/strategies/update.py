"""The update of a synchronous step: unscale, look for overflow, clip, step; the same decision on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from trainkit.strategies.base import Status, Update
from trainkit.strategies.forward_backward import Divisor
from trainkit.strategies.replica import Replica
from trainkit.strategies.sparse import with_values

__all__ = ["apply_update"]


def apply_update(
    replica: Replica, sums: Sequence[Tensor | None], divisor: Divisor, update: Update
) -> tuple[Status, Tensor | None]:
    """Update parameters, buffers and loss scale from the sums over all shards and ranks.

    Args:
        replica: where; its parameters, buffers, optimizer state and loss scale change.
        sums: gradients, then updated buffers, then the counted weight where there is one; consumed.
        divisor: what the loss was divided by.
        update: learning rate and clip of this update.

    Returns:
        What became of the step, and the global norm before clipping where it was needed, () on the device.

    Raises:
        LossScaleError: too many overflows in a row.
    """
    count = len(replica.params)
    grads = sums[:count]
    present = [grad for grad in grads if grad is not None]
    if replica.sparse:
        grads, present = with_values(grads)
    norms_of = partial(_norms, replica, grads, present)
    if divisor.counted:
        _normalise(present, sums[-1], divisor.value)
    scale = replica.loss_scale
    if (scale.moves or replica.numerics.skip_nonfinite) and not _all_finite(norms_of(float("inf"))):
        if replica.buffers.names:
            replica.buffers.reset()
        replica.loss_scale = scale.after(overflow=True)
        return (Status.retry if scale.moves else Status.skipped), None
    if scale.scale != 1.0:
        torch._foreach_mul_(present, 1.0 / scale.scale)
    norm = None if update.max_norm is None else _clip(present, norms_of(2.0), update.max_norm)
    replica.stepper.step(grads, update.lr_factor)
    if replica.masters_apart:
        replica.refresh_params()
    if replica.buffers.names:
        replica.buffers.finish(sums[count : len(sums) - int(divisor.counted)])
    replica.loss_scale = scale.after(overflow=False)
    return Status.applied, norm


def _normalise(grads: list[Tensor], weight: Tensor | None, divisor: float) -> None:
    """From the planned power of two to the counted weight. A weight of zero gives zeros; the engine names it."""
    assert weight is not None
    factor = torch.where(weight > 0, divisor / weight, 0.0).squeeze(0)
    _scale(grads, factor)


def _all_finite(norms: Tensor) -> bool:
    """Whether every gradient is finite, by its largest element. Waits for the device."""
    return bool(torch.isfinite(norms.max()).item())


def _clip(grads: list[Tensor], norms: Tensor, max_norm: float) -> Tensor:
    """Scale gradients down to a global norm; returns the norm before.

    Norms of whole variables, combined in canonical order: norms of pieces would depend on how they were cut.
    """
    norm: Tensor = torch.linalg.vector_norm(norms)
    _scale(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _scale(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients, of one device or of several, by a () tensor."""
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))


def _norms(replica: Replica, grads: Sequence[Tensor | None], present: list[Tensor], order: float) -> Tensor:
    """The norm of each gradient, on the device of the first; collective where ranks hold parts of them."""
    filled = [grad if grad.numel() else grad.new_zeros(1) for grad in present]  # an empty part has no largest element
    norms = torch._foreach_norm(filled, order)  # noqa: SLF001 - what torch's own clipping calls
    if len({norm.device for norm in norms}) > 1:
        norms = tuple(norm.to(norms[0].device) for norm in norms)
    here = torch.stack(norms)
    if replica.join_norms is None:
        return here
    held = [place for place, grad in enumerate(grads) if grad is not None and (not grad.is_sparse or grad._nnz())]  # noqa: SLF001
    return replica.join_norms(here, held, order)
