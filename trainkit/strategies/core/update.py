"""The update of a synchronous step: unscale, check for overflow, clip, step; the same decision on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from trainkit.strategies.base import Status, StepContext, UpdateParams, UpdateTensors
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.sparse import with_values
from trainkit.strategies.core.step import LossDivisor

_LARGEST: Final = float("inf")
"""The order of the norm that is the largest element."""
Observe = Callable[[Sequence[Tensor | None]], None]
"""Function that receives the gradients of an update, in the order of the parameters."""


def ignore_gradients(grads: Sequence[Tensor | None]) -> None:
    """Do nothing: no listener looks at the gradients of this update."""
    del grads


def apply_update(
    replica: Replica,
    sums: Sequence[Tensor | None],
    divisor: LossDivisor,
    update: UpdateParams,
    *,
    loss_sum: Tensor | None = None,
    observe: Observe = ignore_gradients,
) -> tuple[Status, Tensor | None]:
    """Update parameters, buffers and loss scale from the sums over all shards and ranks.

    Args:
        replica: its parameters, buffers, optimizer state and loss scale change.
        sums: gradients, then updated buffers, then the counted weight if there is one; consumed.
        divisor: the divisor of the loss.
        update: learning rate and clip of this update.
        loss_sum: () the loss of this rank, None if it had no shard.
        observe: called with the gradients before they are clipped and the update is made.

    Returns:
        The status of the step, and the global norm before clipping if it was needed, () on the device.

    Raises:
        LossScaleError: too many overflows in a row.
    """
    grads, count = sums[: len(replica.params)], len(replica.params)
    present = [grad for grad in grads if grad is not None]
    if replica.sparse:
        grads, present = with_values(grads)
    norms_of = partial(_norms, replica, grads, present)
    if divisor.counted:
        counted = sums[-1]
        assert counted is not None
        _scale(present, divisor.factor(counted).squeeze(0))
    scale, moves = replica.loss_scale, replica.loss_scale.moves
    if scale.scale != 1.0:
        torch._foreach_mul_(present, 1.0 / scale.scale)
    status, norms = Status.applied, None if update.max_norm is None else norms_of(2.0)
    buffers = sums[count : len(sums) - int(divisor.counted)] if replica.buffers.names else []
    if replica.numerics.leaves_out or moves:
        status = _decided(replica, buffers, loss_sum, norms_of(_LARGEST) if norms is None else norms)
        if norms is not None and status is not Status.applied:
            # in fp32 the squares of gradients above 1.8e19, which are finite, are not
            status = _decided(replica, buffers, loss_sum, norms_of(_LARGEST))
    if status is not Status.applied:
        if replica.buffers.names:
            replica.buffers.reset()
        replica.set_loss_scale(scale.after(overflow=True) if status is Status.retry else scale.after_skip())
        return status, None
    observe(grads)
    norm = None if norms is None or update.max_norm is None else _clip(present, norms, update.max_norm)
    replica.stepper.step(grads, update.lr_factor)
    if replica.masters_apart:
        replica.refresh_params()
    if replica.buffers.names:
        replica.buffers.finish(buffers)
    if moves:
        replica.set_loss_scale(scale.after(overflow=False))
    return Status.applied, norm


def observer(replica: Replica, training: StepContext, step: int) -> Observe:
    """Return a function that passes the gradients of a step to the listener of the training, if it wants them."""
    listener = training.on_gradients
    if not listener.wants(step):
        return ignore_gradients

    def observe(grads: Sequence[Tensor | None]) -> None:
        named = zip(replica.params, grads, strict=True)
        found = {name: grad for name, grad in named if grad is not None}
        tensors = UpdateTensors(
            grads=found, weights=replica.masters, counted=replica.counted_parts, ranks=replica.all_ranks
        )
        listener.take(step, tensors)

    return observe


def _decided(replica: Replica, buffers: Sequence[Tensor | None], loss_sum: Tensor | None, norms: Tensor) -> Status:
    """Decide whether to make an update: whether gradients with these norms are finite; synchronises with the device.

    Where a step may be left out, loss and buffers count, too, and the ranks agree: collective.
    """
    if not replica.numerics.leaves_out:
        return Status.applied if torch.isfinite(norms.max()).item() else Status.retry
    beyond_scaling = [] if loss_sum is None else [~torch.isfinite(loss_sum).all()]
    beyond_scaling += replica.buffers.became_nonfinite(buffers) if replica.buffers.names else []
    return _agreed(replica, beyond_scaling, norms)


def _agreed(replica: Replica, beyond_scaling: Sequence[Tensor], norms: Tensor) -> Status:
    """Decide on a step by the values of all ranks, with the same result on all of them; collective.

    A smaller loss scale helps if gradients overflow, but not if loss or buffers are not finite.
    """
    here = [~torch.isfinite(norms.max())]
    loss_or_buffers = [flag.to(norms.device) for flag in beyond_scaling]
    here.append(torch.stack(loss_or_buffers).any() if loss_or_buffers else torch.zeros_like(here[0]))
    gradients, beyond = replica.all_ranks.sum(torch.stack(here).float()).tolist()
    if not gradients and not beyond:
        return Status.applied
    return Status.retry if replica.loss_scale.may_retry and not beyond else Status.skipped


def _clip(grads: list[Tensor], norms: Tensor, max_norm: float) -> Tensor:
    """Scale gradients down to a global norm; return the norm before that.

    Norms of whole variables are combined in canonical order: norms of parts would depend on how they are cut. One norm
    of the vector that holds the gradients would round otherwise (docs/decisions/0050).
    """
    norm: Tensor = torch.linalg.vector_norm(norms)
    _scale(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _scale(grads: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients, of one device or of several, by a () tensor."""
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))


def _norms(replica: Replica, grads: Sequence[Tensor | None], present: list[Tensor], order: float) -> Tensor:
    """Return the norm of each gradient, on the device of the first; collective if ranks hold parts of them."""
    if replica.join_norms is not None and replica.lanes is not None and order != _LARGEST:
        # a sum of squares depends on the parts; one gradient is whole at a time
        named = [(name, grad) for name, grad in zip(replica.params, grads, strict=True) if grad is not None]
        return torch.cat([torch.stack(torch._foreach_norm([replica.whole(*one)], order)) for one in named])  # noqa: SLF001
    filled = [grad if grad.numel() else grad.new_zeros(1) for grad in present]  # an empty tensor has no largest element
    norms = torch._foreach_norm(filled, order)  # noqa: SLF001 - what torch's own clipping calls
    if len({norm.device for norm in norms}) > 1:
        norms = tuple(norm.to(norms[0].device) for norm in norms)
    here = torch.stack(norms)
    if replica.join_norms is None:
        return here
    held = [place for place, grad in enumerate(grads) if grad is not None and (not grad.is_sparse or grad._nnz())]  # noqa: SLF001
    return replica.join_norms(here, held, order)
