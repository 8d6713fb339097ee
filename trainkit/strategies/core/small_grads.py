"""Add the small gradients of the shards of a step by one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

MOST_ELEMENTS: Final = 2**16
"""Elements of the largest gradient that is put aside; this many in total may be put aside in any model."""
_SHARE: Final = 16
"""Elements of all gradients divided by those of the gradients that are put aside, at least."""


class SmallGrads:
    """The sums over earlier shards of a step's small gradients, put aside during a backward pass.

    Autograd adds the gradient of a later shard to the sum of earlier ones with one launch per parameter: 161 per shard
    for a ResNet-50, of which 127 move less than 256 KiB. These sums are added to the gradients of a backward pass at
    once. Both are alive at the same time; therefore autograd still adds large gradients, and only the smallest ones are
    put aside, up to a share of all: those of a ResNet-50 are a thirtieth. The order of every sum, and so its bits, stay
    the same.

    Args:
        params: of the model.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.ones(2)
        >>> earlier = SmallGrads([weight])
        >>> (2.0 * weight).sum().backward()
        >>> weight.grad.tolist(), earlier.add_up(), weight.grad.tolist()
        ([2.0, 2.0], None, [3.0, 3.0])
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._sums: list[tuple[nn.Parameter, Tensor]] = []
        dense = [(param, grad) for param in params if (grad := param.grad) is not None and grad.layout is torch.strided]
        left = max(MOST_ELEMENTS, sum(grad.numel() for _, grad in dense) // _SHARE)
        for param, grad in sorted(dense, key=lambda one: one[1].numel()):
            left -= grad.numel()
            if left < 0 or grad.numel() > MOST_ELEMENTS:
                break
            self._sums.append((param, grad))
            param.grad = None

    @torch.no_grad()
    def add_up(self) -> None:
        """Add the gradients of the backward pass to the sums, which become the gradients again."""
        totals: list[Tensor] = []
        grads: list[Tensor] = []
        for param, total in self._sums:
            grad, param.grad = param.grad, total
            if grad is None:
                continue  # this shard does not use the parameter
            if grad.layout is torch.strided:
                totals.append(total)
                grads.append(grad)
            else:
                total.add_(grad)
        if grads:
            torch._foreach_add_(totals, grads)
