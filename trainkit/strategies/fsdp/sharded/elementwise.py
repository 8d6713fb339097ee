"""Find optimizers whose update of an element depends on other elements, so that they cannot update parts of a
tensor.
"""

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
    """Return whether an optimizer updates each element of a parameter from that element's gradient and state alone.

    A class of the user that is not elementwise must declare it: `elementwise = False`.

    Example:
        >>> import torch
        >>> is_elementwise(torch.optim.AdamW), is_elementwise(torch.optim.Adafactor)
        (True, False)
    """
    declared = getattr(kind, "elementwise", None)
    if declared is not None:
        return bool(declared)
    return not any(one.__name__.replace("_", "").lower() in _WHOLE for one in kind.__mro__)


def optimizer_problems(facts: PlanContext) -> list[Problem]:
    """Return a problem if the run's optimizer cannot update parts of parameters."""
    kind = facts.optimizer
    if kind is None or is_elementwise(kind):
        return []
    rule = (
        f"{kind.__name__} looks at whole parameters, and here a rank has parts of them. Use an elementwise optimizer "
        "(torch.optim.AdamW), or strategy=mirrored."
    )
    return [Problem(key="optimizer._target_", value=f"{kind.__module__}.{kind.__qualname__}", rule=rule)]
