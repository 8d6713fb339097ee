"""Linear layers of transformers that hold their weight transposed: `Conv1D`, used by GPT-2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes the same as `nn.Linear`.

    Example:
        >>> is_linear(nn.Linear(2, 3)), is_linear(nn.Conv1d(2, 3, 1))
        (True, False)
    """
    return isinstance(module, nn.Linear) or _is_transposed(module)


def as_linear(model: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """Replace each `Conv1D` of a model by an `nn.Linear` with the same numbers, in place.

    Args:
        model: the model, which is changed.
        names: the modules to replace; None: all of them.

    Returns:
        The names of the replaced modules.

    Raises:
        AttributeError, TypeError: a name is not a `Conv1D` of the model.
    """
    if names is None:
        names = [name for name, module in model.named_modules() if _is_transposed(module)]
    replaced = list(names)
    for name in replaced:
        module: Any = model.get_submodule(name)
        if not _is_transposed(module):
            raise TypeError(f"{name} is not a Conv1D")
        made = nn.Linear(module.nx, module.nf, device="meta")
        made.weight = nn.Parameter(module.weight.detach().T.contiguous(), module.weight.requires_grad)
        made.bias = module.bias
        model.set_submodule(name, made.train(module.training))
    return replaced


def _is_transposed(module: nn.Module) -> bool:
    kind = type(module)  # compared by name: transformers need not be installed
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
