"""The batches of a ticket for each pass over them: a model may write into its inputs, and a pass may be repeated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from torch import Tensor

from trainkit.data.reading.collate import moves_itself, parts_of, with_parts


class BatchesAsRead(Sequence[Any]):
    """Batches that every pass gets as they were read.

    The first access returns a batch itself. A later one (a step that is repeated after an overflow, the next phase of a
    step) returns the same tensors in new containers, without a copy, unless a version counter shows that a pass has
    written into one of them: then it returns a copy of what was read.

    Args:
        batches: the batches, one per shard.
        read_again: reads the same batches once more; called at most once, if they were changed and not kept. None: no
            pass follows in which it matters.
        keeps: whether a copy is made at the first access, because a later one is likely to need it.

    Example:
        >>> import torch
        >>> batches = BatchesAsRead([{"x": torch.zeros(2)}], keeps=True)
        >>> batches[0].pop("x").add_(1.0)
        tensor([1., 1.])
        >>> batches[0], batches.were_changed
        ({'x': tensor([0., 0.])}, True)
    """

    def __init__(
        self, batches: Sequence[Any], *, read_again: Callable[[], Sequence[Any]] | None = None, keeps: bool = False
    ) -> None:
        self._batches, self._read_again, self._keeps = batches, read_again, keeps
        self._kept: list[Any] | None = None
        self._seen: dict[int, tuple[Any, list[tuple[Tensor, int]]]] = {}
        """Index -> the batch at its first access, in containers of this class, and the versions of its tensors."""
        self.were_changed = False
        """Whether a pass got a copy, because an earlier one had changed a batch."""

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._take(place) for place in range(len(self._batches))[index]]
        return self._take(range(len(self._batches))[index])

    def _take(self, place: int) -> Any:
        if place not in self._seen:
            batch = self._batches[place]
            if self._keeps and self._kept is None:
                self._kept = [_copied(one) for one in self._batches]
            # Batches of small models are tuples of tensors: a call of a function for each takes more than the rest
            plain = batch.__class__ is tuple
            tensors = (
                batch if plain and [1 for one in batch if one.__class__ is not Tensor] == [] else _all_tensors(batch)
            )
            # `_version` has no public name
            versions = [(tensor, tensor._version) for tensor in tensors]  # noqa: SLF001
            self._seen[place] = batch if tensors is batch else _mapped(batch, lambda tensor: tensor), versions
            return batch
        batch, versions = self._seen[place]
        if all(tensor._version == version for tensor, version in versions):  # noqa: SLF001
            # a pass may have asked for the gradient of its input
            return _mapped(batch, lambda tensor: tensor.detach() if tensor.requires_grad else tensor)
        self.were_changed = True
        if self._kept is None:
            if self._read_again is None:
                return batch
            self._kept = list(self._read_again())
        return _copied(self._kept[place])


def _all_tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif (parts := parts_of(batch)) is not None:
        for part in parts:
            yield from _all_tensors(part)
    else:
        yield from _attributes(batch)


def _attributes(value: object) -> list[Tensor]:
    """Return the tensors that an object of another class holds."""
    return [part for part in getattr(value, "__dict__", {}).values() if isinstance(part, Tensor)]


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch in new containers, with its tensors changed by a function."""
    if isinstance(batch, Tensor):
        return change(batch)
    return batch if moves_itself(batch) else with_parts(batch, lambda part: _mapped(part, change))


def _copied(batch: Any) -> Any:
    """Return a copy in memory of its own."""
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if moves_itself(batch) or (parts_of(batch) is None and _attributes(batch)):
        return copy.deepcopy(batch)
    return with_parts(batch, _copied)
