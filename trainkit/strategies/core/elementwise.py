"""Find whether an optimizer updates each element of a parameter on its own, before ranks hold parts of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn, optim

MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]
"""Function that builds the optimizer of a config over some parameters."""

_ELEMENTWISE: Final[frozenset[type]] = frozenset(
    {optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam, optim.RAdam,
     optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam}
)  # fmt: skip
_STEPS: Final = 5
_SHAPES: Final = ((6, 4), (6,))


def whole_reason(kind: type | None, makers: Sequence[MakeOptimizer] = ()) -> str | None:
    """Return why an optimizer may not update parts of parameters; None if it updates each element on its own.

    Classes of torch.optim are known. Any other class, also one derived of them, says so itself by an attribute
    (`elementwise = True`), or is tried: it steps with a tensor and, in an optimizer of its own as on a rank, with each
    of two cuts of it, along both dims. Values and state must be equal up to the rounding of float32.

    Args:
        kind: the class; None: a function of the user builds the optimizer.
        makers: one function per parameter group that the config sets; empty: the class is called with a rate only.

    Example:
        >>> whole_reason(torch.optim.AdamW), whole_reason(torch.optim.Adafactor)
        (None, 'uses whole parameters')
    """
    declared = getattr(kind, "elementwise", None)
    if kind in _ELEMENTWISE or declared:
        return None
    if declared is not None:
        return "uses whole parameters"
    for make in makers or ([] if kind is None else [partial(kind, lr=0.1)]):
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                if not _is_alike(make):
                    return "uses whole parameters"
        except Exception as error:  # noqa: BLE001 - code of the user may fail in any way
            return f"cannot be tried with cuts of a tensor ({type(error).__name__}: {error})"
    return None


def _is_alike(make: MakeOptimizer) -> bool:
    """Return whether steps with two cuts of a tensor give the cuts of what steps with the tensor give."""
    whole = _stepped(make, lambda tensor: tensor)
    cuts = [(dim, start, stop) for dim in (0, 1) for start, stop in ((0, 2), (2, _SHAPES[0][dim]))]
    for dim, start, stop in cuts:

        def part(tensor: Tensor, dim: int = dim, start: int = start, stop: int = stop) -> Tensor:
            return tensor.narrow(dim, start, stop - start) if dim < tensor.dim() else tensor

        found = _stepped(make, part)
        if found.keys() != whole.keys():
            return False
        for key, value in whole.items():
            expected = part(value) if tuple(value.shape) in _SHAPES else value
            tolerance = 64 * torch.finfo(torch.float32).eps * max(float(expected.abs().max()), 1e-30)
            if found[key].shape != expected.shape or float((found[key] - expected).abs().max()) > tolerance:
                return False
    return True


def _stepped(make: MakeOptimizer, part: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the parameters and the state of an optimizer after some steps with parts of two tensors."""
    numbers = [torch.linspace(-1, 2, torch.Size(shape).numel()).view(shape) for shape in _SHAPES]
    params = [nn.Parameter(part(torch.sin(9 * one)).clone()) for one in numbers]
    optimizer = make(params)
    for step in range(1, _STEPS + 1):
        for param, one in zip(params, numbers, strict=True):
            param.grad = part(torch.cos(step * 7 * one) * (one + 1.5)).clone()
        optimizer.step()
    found = {f"param {place}": param.detach() for place, param in enumerate(params)}
    for place, param in enumerate(params):
        slots = optimizer.state[param].items()
        found.update({f"{slot} {place}": torch.as_tensor(value) for slot, value in slots if _is_number(value)})
    for place, group in enumerate(optimizer.param_groups):
        found.update({f"{key} of {place}": torch.as_tensor(one) for key, one in group.items() if _is_number(one)})
    return {key: value.detach().double() for key, value in found.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor | int | float)
