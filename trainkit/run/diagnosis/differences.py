"""Differences beyond rounding between one step of a candidate and the plain loop's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from trainkit.run.diagnosis.evidence import Expected, Tensors

ULPS: Final = 4096.0
"""Tolerance, in units in the last place, of a sum in another order: 9e-13 in float64, 5e-4 in float32."""
_COPIES: Final = 8.0
"""Additional tolerance for an update, in units in the last place of the parameter: it is rounded a few times."""
_NO_GRADIENT: Final = 1e-12
"""A gradient below this fraction of the model's norm is zero except for rounding."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs in one step beyond rounding."""

    step: int
    found: Tensors
    """The tensors of the candidate that differ."""
    expected: Tensors
    """The same of the plain loop."""
    allowed: Mapping[str, float]
    """The norm of a difference that counts as rounding, by name."""


def distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of a difference, in float64 on the host; NaN or infinite where a tensor is not finite."""
    return float((one.detach().cpu().double() - other.detach().cpu().double()).norm())


def norm(tensor: Tensor | None) -> float:
    """Return the norm of a tensor, 0 for None."""
    return 0.0 if tensor is None else float(tensor.detach().double().norm())


def _epsilon(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def differing_gradients(
    step: int, expected: Expected, found: Tensors, *, errors: dict[str, float], read_from: Tensors | None, rate: float
) -> Difference | None:
    """Compare the gradients of a step; None if all are equal up to rounding.

    Args:
        step: the step.
        expected: the result of the plain loop.
        found: the gradients of the candidate.
        errors: receives the relative error of each.
        read_from: the parameters whose difference gave the gradient; None: the gradient itself was saved.
        rate: the learning rate that this difference was divided by.
    """
    whole = sum(scale**2 for scale in expected.scale.values()) ** 0.5
    allowed: dict[str, float] = {}
    wrong: list[str] = []
    full = {name: expected.gradient.get(name, torch.zeros_like(grad)) for name, grad in found.items()}
    for name, grad in found.items():
        scale = expected.scale.get(name, 0.0)
        epsilon = _epsilon(grad)
        allowed[name] = max(ULPS * epsilon * scale, _NO_GRADIENT * whole)
        if read_from is not None:
            allowed[name] += 4 * epsilon * norm(read_from[f"param/{name}"]) / rate
        off = distance(full[name], grad)
        errors[name] = off / (scale if scale > _NO_GRADIENT * whole else whole) if off else 0.0
        if not off <= allowed[name]:
            wrong.append(name)
    return _difference(step, wrong, found, full, allowed)


def differing_buffers(step: int, expected: Tensors, found: Tensors) -> Difference | None:
    """Compare the buffers after a step; None if all are equal up to rounding."""
    allowed = {
        name: ULPS * _epsilon(tensor) * norm(tensor) if tensor.is_floating_point() else 0.0
        for name, tensor in expected.items()
    }
    wrong = [name for name, tensor in expected.items() if not distance(tensor, found[name]) <= allowed[name]]
    return _difference(step, wrong, found, expected, allowed)


def differing_parameters(
    step: int, expected: Tensors, *, before: Tensors, found: Tensors, skipped: Iterable[str]
) -> Difference | None:
    """Compare the parameters after one update from the same checkpoint; None if all are equal up to rounding.

    `skipped` are parameters without a gradient, whose update is rounding.
    """
    left_out = frozenset(skipped)
    allowed = {
        name: _epsilon(tensor) * (_COPIES * norm(tensor) + ULPS * distance(tensor, before[name]))
        for name, tensor in expected.items()
    }
    wrong = [
        name
        for name, tensor in expected.items()
        if name not in left_out and not distance(tensor, found[name]) <= allowed[name]
    ]
    return _difference(step, wrong, found, expected, allowed)


def _difference(
    step: int, wrong: list[str], found: Tensors, expected: Tensors, allowed: Mapping[str, float]
) -> Difference | None:
    if not wrong:
        return None
    return Difference(
        step=step,
        found={name: found[name] for name in wrong},
        expected={name: expected[name] for name in wrong},
        allowed={name: allowed[name] for name in wrong},
    )
