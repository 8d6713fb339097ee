"""Which objects are models that strategies can train."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter


def why_untrainable(model: object) -> str | None:
    """Return why no strategy trains an object that was built as a model, and the remedy; None for a model.

    Example:
        >>> why_untrainable(nn.LazyLinear(2)).partition(".")[0]
        'has a parameter, weight, without a shape: it gets one in the first forward pass'
        >>> why_untrainable(nn.Linear(2, 2)) is None
        True
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        return f"gives a {name}, not a torch.nn.Module."
    if isinstance(model, torch.jit.ScriptModule):
        return "gives a module of torch.jit, which takes no hooks. Give the class that it was made of."
    if "_parameters" not in vars(model):
        return f"{name}.__init__ does not call super().__init__(), as every torch.nn.Module must."
    for path, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            return (
                f"has a parameter, {path}, without a shape: it gets one in the first forward pass. Give its layer the "
                "sizes, or call the model once in its constructor."
            )
        if param.is_complex():
            return (
                f"has a complex parameter, {path}. Keep torch.view_as_real of it as the parameter, and use "
                "torch.view_as_complex in forward."
            )
    return None
