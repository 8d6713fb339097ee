"""The operations of a training step: floating-point operations, and bytes read and written, counted without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from trainkit.run.estimates.hardware import Hardware

_ALLOCATE: Final = frozenset(
    f"aten::{name}"
    for name in ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operations that return memory without reading or writing it."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations, counted by their sizes.

    Example:
        >>> work = Work(operations={(2000, 120): 3, (0, 80): 1})
        >>> work.flops, work.num_bytes, work.num_operations, work.times(2).flops
        (6000, 440, 4, 12000)
    """

    operations: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(floating-point operations, bytes read and written) of an operation -> number of such operations."""

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiplication with an addition counts as two."""
        return round(sum(flops * count for (flops, _), count in self.operations.items()))

    @property
    def num_bytes(self) -> int:
        """Bytes that operations read and write, as if there were no caches."""
        return round(sum(size * count for (_, size), count in self.operations.items()))

    @property
    def num_operations(self) -> int:
        """Operations that the host starts."""
        return round(sum(self.operations.values()))

    def times(self, factor: float) -> Work:
        """Return the work of `factor` repetitions."""
        return Work(operations={sizes: count * factor for sizes, count in self.operations.items()})

    def cut(self, parts: float) -> Work:
        """Return the work of one of several devices that share each operation."""
        operations: Counter[tuple[int, int]] = Counter()
        for (flops, size), count in self.operations.items():  # two may be equal after the cut
            operations[round(flops / parts), round(size / parts)] += count  # type: ignore[assignment]
        return Work(operations=operations)

    def bound_s(self, hardware: Hardware, precision: str) -> tuple[float, float]:
        """Return the seconds of operations that are bound by computing and of operations bound by memory, at the peaks.

        Source: Williams et al. 2009, "Roofline: an insightful visual performance model".
        """
        peak, rate = hardware.peak_flops(precision) or float("inf"), hardware.memory_gb_s * 1e9
        computing = moving = 0.0
        for (flops, size), count in self.operations.items():
            compute_s, memory_s = flops / peak * count, size / rate * count
            if compute_s >= memory_s:
                computing += compute_s
            else:
                moving += memory_s
        return computing, moving


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that run inside, with torch's own formulas for their floating-point operations.

    It is entered within a `FakeTensorMode`, so that it sees each operation once.

    Example:
        >>> with WorkCounter() as counter:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> counter.work().flops
        48
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it; a view and an allocation count nothing."""
        named = kwargs or {}
        found = func(*args, **named)
        if not is_free(func):
            formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)  # noqa: SLF001 - as torch does
            flops = 0 if formula is None else int(formula(*args, **named, out_val=found))
            self._operations[flops, _bytes_of((args, named, found))] += 1
        return found

    def work(self) -> Work:
        """Return the work counted so far."""
        return Work(operations=dict(self._operations))


def is_free(func: Any) -> bool:
    """Return whether an operation neither reads nor writes the elements of a tensor."""
    name: str = func._schema.name  # noqa: SLF001 - torch has no public name for the schema
    returns = func._schema.returns  # noqa: SLF001
    if not name.startswith("aten::") or name in _ALLOCATE or not returns:
        return True
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _bytes_of(values: Any) -> int:
    """Return the bytes of all tensors; one that is argument and result counts once."""
    tensors = {id(leaf): leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor)}
    return sum(one.numel() * one.element_size() for one in tensors.values() if one.layout is torch.strided)


def update_work(elements: int, *, width: int, slots: int) -> Work:
    """Return the update of an optimizer: gradients are read, parameters and slots are read and written.

    Args:
        elements: trained parameters of a device.
        width: bytes of an element.
        slots: tensors of the optimizer's state that have the shape of a parameter.
    """
    return Work(operations={(0, elements * width * (3 + 2 * slots)): 1}) if elements else Work()
