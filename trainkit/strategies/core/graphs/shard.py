"""The loss and the gradients of one shard, as a function that torch.compile traces whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trainkit.strategies.base import Batch, StepContext
from trainkit.strategies.core.replica import Replica


class ShardGradients:
    """Computes loss and gradients of a shard, with the numbers of `ShardStep`.

    Args:
        replica: provides the model and the parameters.
        training: provides the objective.
        used: for each parameter in canonical order, whether it gets a gradient; None: not known, and not checked.
        by_others: whether shards of other ranks may use parameters that those of this rank do not use.
    """

    def __init__(
        self, replica: Replica, training: StepContext, *, used: Sequence[bool] | None, by_others: bool
    ) -> None:
        self._model, self._params, self._objective = replica.model, replica.trained, training.objective
        self._dtype, self._by_others = replica.precision.master_dtype, by_others
        self._used = None if used is None else tuple(used)
        self._names = tuple(training.objective.term_names)
        precision = replica.precision
        self._autocast = None if precision.compute_dtype is precision.model_dtype else precision.compute_dtype
        self._device_type = replica.device.type

    def __call__(
        self, batch: Batch, seed: Tensor
    ) -> tuple[Tensor, Tensor | float, tuple[Tensor, ...], list[Tensor | None]]:
        """Return the loss, its weight, its terms, and the gradients in the masters' dtype; None for a parameter without
        a gradient.

        Args:
            batch: a collated shard, on the device.
            seed: () the start gradient of backward: loss scale over divisor.
        """
        with self._context():
            loss = self._objective.loss(self._model, batch)
        total = loss.loss_sum if loss.extra is None else loss.loss_sum + loss.extra * loss.weight
        found: Sequence[Tensor | None] = torch.autograd.grad(
            total, self._params, seed.to(total.dtype), allow_unused=True
        )
        for grad, used in zip(found, self._used, strict=True) if self._used is not None else ():
            if grad is None and used and not self._by_others:
                raise RuntimeError("a parameter got a gradient in the first step, and gets none here")
            if grad is not None and not used:
                raise RuntimeError("a parameter got no gradient in the first step, and gets one here")
        grads = [None if grad is None else grad.to(self._dtype) for grad in found]
        terms: Any = loss.terms or {}
        weight = loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight
        return loss.loss_sum.detach(), weight, tuple(terms[name].detach() for name in self._names), grads

    def _context(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._autocast)
