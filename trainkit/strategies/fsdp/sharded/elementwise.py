"""Optimizers whose update of an element looks at others, and is not to be had from parts of a tensor."""

from __future__ import annotations

from typing import Final

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext

__all__ = ["is_elementwise", "optimizer_problems"]

# By the name of the class, of torch's and of the packages that have one: matrices (Muon, Shampoo, SOAP), norms of whole
# tensors (LAMB, LARS, NovoGrad), averages over rows and columns (Adafactor), the whole model (LBFGS).
_WHOLE: Final = frozenset(
    {"adafactor", "adafactorbigvision", "lamb", "lars", "larc", "lbfgs", "lion8bit", "muon", "nvnovograd", "novograd",
     "shampoo", "distributedshampoo", "soap", "adamini", "adammini", "galore", "galoreadamw"}
)  # fmt: skip


def is_elementwise(kind: type) -> bool:
    """Whether an optimizer updates each element of a parameter from that element's gradient and state alone.

    A class of the user's own says so itself, where it does not: `elementwise = False`.

    Example:
        >>> import torch
        >>> is_elementwise(torch.optim.AdamW), is_elementwise(torch.optim.Adafactor)
        (True, False)
    """
    said = getattr(kind, "elementwise", None)
    if said is not None:
        return bool(said)
    return not any(one.__name__.replace("_", "").lower() in _WHOLE for one in kind.__mro__)


def optimizer_problems(facts: PlanContext) -> list[Problem]:
    """Whether the run's optimizer can step parts of parameters."""
    kind = facts.optimizer
    if kind is None or is_elementwise(kind):
        return []
    rule = (
        f"{kind.__name__} looks at whole parameters, and here a rank has parts of them. Use an elementwise optimizer "
        "(torch.optim.AdamW), or strategy=mirrored."
    )
    return [Problem(key="optimizer._target_", value=f"{kind.__module__}.{kind.__qualname__}", rule=rule)]
