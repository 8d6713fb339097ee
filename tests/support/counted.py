"""A rank of a contract case with the bytes of its tensors, or of the scores of a language model, counted."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.contract.stepping import Case, _Rank, run_rank
from tests.support.counting import Counting
from tests.support.pool import Member


def bytes_of_rank(member: Member | None, case: Case) -> tuple[int, int]:
    """(when the last update began, the most of the step before it) of one rank, or of one device."""
    with Counting() as counting:
        run_rank(member, case)
    return counting.lasting, counting.peak


def bytes_of_start(member: Member | None, case: Case) -> int:
    """The most while one rank, or one device, builds its model and keeps its part."""
    with Counting() as counting:
        _Rank(member, case).setup(0).close()
    return counting.most


_FEW: Final = ("gather", "scatter_", "scatter")
"""Operations that touch as many elements as their index has."""


class ScoreBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, counts what operations read and write of tensors with at least so many elements.

    A view costs nothing. An operation counts as one kernel that reads each input and writes each output once.
    """

    def __init__(self, *, at_least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at_least = at_least
        self.moved = 0
        self.peak = 0
        self._alive = 0
        self._known: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation."""
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        writes = func._schema.is_mutable
        before = {id(leaf.untyped_storage()) for leaf in inputs}
        if writes or any(id(leaf.untyped_storage()) not in before for leaf in outputs):
            few = func.overloadpacket.__name__ in _FEW
            self.moved += 0 if few else sum(map(self._bytes, [*inputs, *outputs]))
        for leaf in outputs:
            self._see(leaf)
        return result

    def _bytes(self, tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size() if tensor.numel() >= self.at_least else 0

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = weakref.ref(storage, self._forget)
        if key not in self._known and storage.nbytes() >= self.at_least * tensor.element_size():
            self._known[key] = storage.nbytes()
            self._alive += storage.nbytes()
            self.peak = max(self.peak, self._alive)

    def _forget(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self._alive -= self._known.pop(key, 0)


def widths_of_rank(member: Member | None, case: Case) -> list[int]:
    """The last dims of all matrices that one rank of a contract case makes."""
    with _Widths() as widths:
        run_rank(member, case)
    return sorted(widths.dims)


class _Widths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dims: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.dims.update(leaf.shape[-1] for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.dim() > 1)
        return result
