"""The updates of torch's optimizers as plain tensor operations, which a compiler fuses with the preceding operations.

A value that changes from step to step (learning rate, bias corrections) is an element of a tensor: a number of Python
would be a constant of the graph, and each step would compile another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Formula(Protocol):
    """The update of a parameter group."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of the optimizer that the update reads and writes, all with the shape of the parameter."""
        ...

    @property
    def num_values(self) -> int:
        """The number of values that change from step to step."""
        ...

    def values(self, lr: float, count: int) -> tuple[float, ...]:
        """Return these values for an update.

        Args:
            lr: the learning rate.
            count: updates of the parameter, this one included.
        """
        ...

    def apply(self, param: Tensor, grad: Tensor, slots: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Update a parameter and its slots in place; `values` are () tensors."""
        ...


@dataclass(frozen=True, kw_only=True)
class AdamFormula:
    """The update of torch.optim.Adam and AdamW.

    Example:
        >>> formula = AdamFormula(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True)
        >>> [round(value, 6) for value in formula.values(lr=0.5, count=1)]
        [0.95, 5.0, 0.031623]

    Source: torch.optim.adam; Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """Whether weight decay acts on the parameter (AdamW) and not on the gradient."""
    amsgrad: bool = False
    maximize: bool = False
    num_values: ClassVar[int] = 3

    @property
    def slots(self) -> tuple[str, ...]:
        """The averages of the gradient and of its square; with amsgrad the largest of the latter."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def values(self, lr: float, count: int) -> tuple[float, ...]:
        """Return the factor of decoupled decay, the step size, and the root of the second bias correction."""
        beta1, beta2 = self.betas
        return 1.0 - lr * self.weight_decay, lr / (1.0 - beta1**count), math.sqrt(1.0 - beta2**count)

    def apply(self, param: Tensor, grad: Tensor, slots: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Update a parameter and its slots in place."""
        decay, step_size, root_correction = values
        beta1, beta2 = self.betas
        grad = -grad if self.maximize else grad
        kept: Tensor = param.detach()
        if self.weight_decay and self.decoupled:
            kept = kept * decay
        elif self.weight_decay:
            grad = grad + self.weight_decay * kept
        average = slots[0] + (1.0 - beta1) * (grad - slots[0])
        square = slots[1] * beta2 + (1.0 - beta2) * grad * grad
        slots[0].copy_(average)
        slots[1].copy_(square)
        if self.amsgrad:
            square = torch.maximum(slots[2], square)
            slots[2].copy_(square)
        param.copy_(kept - step_size * (average / (square.sqrt() / root_correction + self.eps)))


@dataclass(frozen=True, kw_only=True)
class SgdFormula:
    """The update of torch.optim.SGD after its first step, which creates the momentum.

    Example:
        >>> param, momentum = torch.tensor([1.0]), torch.tensor([2.0])
        >>> formula = SgdFormula(momentum=0.5, dampening=0.0, weight_decay=0.0, nesterov=False)
        >>> formula.apply(param, torch.tensor([1.0]), [momentum], [torch.tensor(0.25)])
        >>> param.item(), momentum.item()
        (0.5, 2.0)

    Source: torch.optim.sgd; Sutskever et al. 2013.
    """

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool = False
    num_values: ClassVar[int] = 1

    @property
    def slots(self) -> tuple[str, ...]:
        """The momentum, if there is one."""
        return ("momentum_buffer",) if self.momentum else ()

    def values(self, lr: float, count: int) -> tuple[float, ...]:  # noqa: ARG002 - the same at each
        """Return the learning rate."""
        return (lr,)

    def apply(self, param: Tensor, grad: Tensor, slots: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Update a parameter and its momentum in place."""
        grad = -grad if self.maximize else grad
        if self.weight_decay:
            grad = grad + self.weight_decay * param.detach()
        if self.momentum:
            momentum = slots[0] * self.momentum + (1.0 - self.dampening) * grad
            slots[0].copy_(momentum)
            grad = grad + self.momentum * momentum if self.nesterov else momentum
        param.copy_(param.detach() - values[0] * grad)


def formula_of(kind: type, group: Mapping[str, Any]) -> Formula | None:
    """Return the formula of a parameter group of exactly this class of optimizer; None if there is none.

    A subclass may behave differently, so it has none.

    Example:
        >>> formula_of(torch.optim.RMSprop, {}) is None
        True
    """
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return AdamFormula(
            betas=(beta1, beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")),
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
        )
    if kind is torch.optim.SGD:
        return SgdFormula(
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )
    return None


FORMULAS: tuple[type, ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""The classes of optimizers that have a formula."""
