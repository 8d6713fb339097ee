"""The pass of a rank of a tensor parallel replica, on a model without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from trainkit.strategies.memory import RankPass
from trainkit.strategies.mesh.gathered_pass import GatheredPass
from trainkit.strategies.mesh.tensor import (
    Exchange,
    cut_parameters,
    exchange_activations,
)
from trainkit.strategies.mesh.tensor_plan import MatchedPlan


class CutPass(RankPass):
    """The pass of a rank with a part of each layer of a plan.

    Args:
        fitted: function that matches the plan with a model.
        degree: number of ranks over which each layer is sharded.
        by_gloo: whether the backend is gloo, that of ranks on the CPU.
        gathered: the pass of a rank whose parts are sharded over the replicas; None: they are not sharded.
    """

    cuts_operations = True

    def __init__(
        self, fitted: Callable[[nn.Module], MatchedPlan], degree: int, *, by_gloo: bool, gathered: GatheredPass | None
    ) -> None:
        self._fitted, self._degree, self._by_gloo = fitted, degree, by_gloo
        self._gathered: RankPass = gathered or RankPass()
        self.sums_in_master_dtype = gathered is not None  # type: ignore[misc]

    def prepare(self, model: nn.Module) -> None:
        """Keep the first rank's part of each layer, and register the exchange of activations of the layers."""
        fit = self._fitted(model)
        cut_parameters(model, fit, place=0, degree=self._degree, is_first=True)
        self._gathered.prepare(model)
        exchange_activations(model, fit, _ExchangeWithoutData(self._degree, by_gloo=self._by_gloo))

    def keep_gradients(self, model: nn.Module) -> Any:
        """Give parameters the gradients of an earlier shard."""
        return self._gathered.keep_gradients(model)

    def gradients(self, model: nn.Module) -> Any:
        """End the backward pass; return the gradients that remain on the rank."""
        return self._gathered.gradients(model)


class _ExchangeWithoutData(Exchange):
    """Changes layouts like the first rank of a mesh: it allocates the same tensors, and sends nothing."""

    def __init__(self, degree: int, *, by_gloo: bool) -> None:
        self.place, self.degree, self.watch, self._by_gloo = 0, degree, None, by_gloo

    def reduced(self, tensor: Tensor, op: Any) -> Tensor:  # noqa: ARG002 - of any
        """Return the tensor: its collective is in place."""
        return tensor

    def changed(self, tensor: Tensor, layout: Placement, to: Placement, *, used_by_parts: bool = False) -> Tensor:
        """Return a tensor in another layout; its gradient changes the layout back."""
        arrives = Partial() if used_by_parts else to
        returns = Replicate() if isinstance(layout, Partial) else layout
        found: Tensor = _Changed.apply(tensor, self, (layout, to), (arrives, returns))  # type: ignore[no-untyped-call]
        return found

    def allocated(self, tensor: Tensor, layout: Placement, to: Placement) -> Tensor:
        """Return the result of DTensor's `redistribute`, allocating the temporary tensors of its functional
        collectives.
        """
        if layout == to:
            return tensor.view_as(tensor)
        if isinstance(layout, Shard):
            return self._gather(tensor, layout.dim)
        if isinstance(to, Shard):
            if isinstance(layout, Partial):
                return self._sum_by_parts(tensor, to.dim)
            return tensor.chunk(self.degree, to.dim)[0].clone()
        return tensor.clone(memory_format=torch.contiguous_format)  # the all-reduce works in place of a copy

    def _gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather along the first dim, then join the chunks along the dim."""
        tensor = tensor.contiguous()
        stacked = tensor.new_empty((tensor.shape[0] * self.degree, *tensor.shape[1:]))
        if self._by_gloo:
            torch.empty_like(stacked)  # gloo receives into separate memory
        return stacked if dim == 0 else torch.cat(stacked.chunk(self.degree), dim=dim)

    def _sum_by_parts(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the parts, and keep the first one of the sum."""
        laid = tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(self.degree, dim))
        kept = laid.new_empty((laid.shape[0] // self.degree, *laid.shape[1:]))
        if self._by_gloo:
            torch.empty_like(laid)  # gloo sums a copy
        return kept


class _Changed(torch.autograd.Function):
    """Changes the layout of a tensor, and that of its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        exchange: _ExchangeWithoutData,
        forward: tuple[Placement, Placement],
        backward: tuple[Placement, Placement],
    ) -> Tensor:
        """Return the tensor in another layout."""
        ctx.exchange, ctx.backward = exchange, backward
        return exchange.allocated(tensor, *forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient in the layout of the tensor."""
        return ctx.exchange.allocated(grad, *ctx.backward), None, None, None
