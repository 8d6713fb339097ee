"""Collate samples into a batch, and cut a batch into shards."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any, Final, Protocol, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trainkit.errors import DataError
from trainkit.objectives.fields import tuple_like


class CollateFunction(Protocol):
    """Function that makes a batch of samples."""

    def __call__(self, samples: Sequence[Any], indices: Sequence[int], /) -> Any:
        """Return the batch; `indices` are the indices of the samples in the dataset, for messages."""


REMEDY: Final = "Samples of several sizes need a collate: data.collate=PACKAGE.FUNCTION (docs/data.md)."
"""Advice about samples that cannot be stacked."""


def collate(samples: Sequence[Any], indices: Sequence[int]) -> Any:
    """Stack samples into one batch: tensors, arrays and numbers become tensors, text stays a list.

    A batch has the structure of a sample: a tuple of tensors, named or not, a dict of them, or any nesting of these; a
    dataclass becomes a dict of its fields. Integers become int64, floats float32 (torch's default dtype).

    Args:
        samples: at least one sample, all of one structure.
        indices: their indices in the dataset; for messages only.

    Raises:
        DataError: a sample differs from the first, or cannot be converted to tensors; names its index.

    Example:
        >>> collate([(torch.zeros(2), 1), (torch.ones(2), 0)], [4, 9])
        (tensor([[0., 0.],
                [1., 1.]]), tensor([1, 0]))
    """
    try:
        return stack(samples)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(_collate_error(samples, indices, error)) from error


def stack(column: Sequence[Any]) -> Any:
    """Stack the values of one field of some samples.

    Raises:
        TypeError: there is no batch of such values.
        ValueError: arrays or structures differ.
        RuntimeError: tensors differ in shape.
        KeyError: dicts differ in their keys.
    """
    if is_dataclass(first := column[0]):
        column = [{field.name: getattr(sample, field.name) for field in fields(sample)} for sample in column]
        first = column[0]
    if isinstance(first, Tensor):
        return torch.stack(tuple(column))
    if isinstance(first, tuple | list):
        return tuple_like(first, map(stack, zip(*column, strict=True)))
    if isinstance(first, np.ndarray | np.generic):
        return torch.from_numpy(np.stack(column))
    if isinstance(first, bool | int | float):
        return torch.tensor(column)
    if isinstance(first, Mapping):
        if any(sample.keys() != first.keys() for sample in column):
            raise KeyError("other keys")
        return {key: stack([sample[key] for sample in column]) for key in first}
    if isinstance(first, str | bytes):
        return list(column)
    raise TypeError(f"a {type(first).__name__} cannot become part of a batch")


def _collate_error(samples: Sequence[Any], indices: Sequence[int], error: Exception) -> str:
    """Find the sample that causes the error: the first one that cannot be collated alone, or together with sample 0."""
    for sample, index in zip(samples, indices, strict=True):
        try:
            stack([sample])
        except (TypeError, ValueError, RuntimeError) as alone:
            return f"sample {index} cannot be part of a batch: {alone}."
    for sample, index in zip(samples, indices, strict=True):
        try:
            stack([samples[0], sample])
        except (TypeError, ValueError, RuntimeError, KeyError):
            return (
                f"sample {index} cannot be in a batch with sample {indices[0]}: "
                f"{shape_text(sample)} differs from {shape_text(samples[0])}. {REMEDY}"
            )
    return f"samples {indices[0]} to {indices[-1]} cannot be stacked: {error}"


def shape_text(sample: Any) -> str:
    """Return the structure of a sample or batch with dtypes and shapes, for messages.

    Example:
        >>> shape_text({"x": torch.zeros(2, 3), "y": 1})
        '{x: float32 (2, 3), y: int}'
    """
    if isinstance(sample, Tensor | np.ndarray):
        return f"{sample.dtype} {tuple(sample.shape)}".removeprefix("torch.")
    if isinstance(sample, tuple | list):
        return f"({', '.join(shape_text(part) for part in sample)})"
    if is_dataclass(sample) and not isinstance(sample, type):
        return type(sample).__name__ + shape_text({field.name: getattr(sample, field.name) for field in fields(sample)})
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {shape_text(part)}" for key, part in sample.items()) + "}"
    return type(sample).__name__


def refuse_other_rows(batch: Any, count: int, source: str) -> None:
    """Refuse a batch of a dataset's own method that holds arrays, or another number of samples.

    Raises:
        DataError: names the method and the first such value.

    Example:
        >>> refuse_other_rows({"x": torch.zeros(2, 3), "text": ["a", "b"]}, 2, "gather(indices)")
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, np.ndarray) or (isinstance(leaf, Tensor) and leaf.shape[:1] != (count,)):
            remedy = ": torch.from_numpy(array)" if isinstance(leaf, np.ndarray) else ""
            rule = f"It must give tensors with a row for each sample{remedy}."
            raise DataError(f"{source} gives {shape_text(leaf)} for {count} samples. {rule}")


def narrow(batch: Any, start: int, size: int) -> Any:
    """Return a range of a batch: views, no copies. Autograd sees each as a separate tensor, so that a model may write
    into its inputs, also into those that it differentiates.

    Example:
        >>> narrow((torch.arange(4), ["a", "b", "c", "d"]), 1, 2)
        (tensor([1, 2]), ['b', 'c'])
    """
    if isinstance(batch, Tensor):
        return batch.narrow(0, start, size).data
    if isinstance(batch, list):
        return batch[start : start + size]
    parts = with_parts(batch, lambda part: narrow(part, start, size))
    return batch[start : start + size] if parts is batch else parts


def with_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container whose parts are changed by a function: a tuple, named or not, a list, a mapping as a dict, or
    a dataclass; any other object is returned itself.

    Example:
        >>> with_parts({"x": 1, "y": (2, 3)}, str)
        {'x': '1', 'y': '(2, 3)'}
    """
    if isinstance(batch, tuple):
        return tuple_like(batch, map(change, batch))
    if isinstance(batch, Mapping):
        return {key: change(part) for key, part in batch.items()}
    if isinstance(batch, list):
        return [change(part) for part in batch]
    if is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in fields(batch):
            object.__setattr__(changed, field.name, change(getattr(batch, field.name)))  # it may be frozen
        return changed
    return batch


def plain_parts(batch: Any) -> Collection[Tensor] | None:
    """Return the tensors of a tuple or dict of nothing else; None for any other batch.

    Most batches are such: of a small model, one call of a function for each part of a batch takes longer than the rest.
    """
    parts = batch if batch.__class__ is tuple else batch.values() if batch.__class__ is dict else ()
    return parts if parts and [1 for part in parts if part.__class__ is not Tensor] == [] else None


def _like(batch: Any, parts: Iterable[Tensor]) -> Any:
    """Return other parts in the container of a batch that has `plain_parts`."""
    return tuple(parts) if batch.__class__ is tuple else dict(zip(batch, parts, strict=True))


def shards_of(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into its shards, as views."""
    if (parts := plain_parts(batch)) is not None:
        rows = zip(*([part.data for part in torch.split(tensor, [*sizes])] for tensor in parts), strict=True)
        return [_like(batch, row) for row in rows]
    ends = accumulate(sizes)
    return [narrow(batch, end - size, size) for size, end in zip(sizes, ends, strict=True)]


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors that `to_device` moves; objects with a method `to` move their own content."""
    return (leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor))


def immovable_in(batch: Any) -> Iterator[Any]:
    """Yield the objects in a batch whose tensors `to_device` does not move: it does not know their class.

    Example:
        >>> from types import SimpleNamespace
        >>> [type(one).__name__ for one in immovable_in([SimpleNamespace(x=torch.ones(2)), "text"])]
        ['SimpleNamespace']
    """
    return (leaf for leaf in _leaves(batch) if not moves_itself(leaf) and _attributes(leaf))


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield what the containers of a batch hold; one that moves itself is a leaf."""
    parts = None if moves_itself(batch) else parts_of(batch)
    if parts is None:
        yield batch
    for part in parts or ():
        yield from _leaves(part)


def to_device(batch: Any, device: torch.device, move: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Return the batch on a device. A copy from pinned memory to an accelerator is asynchronous to the host.

    Objects that are neither tensors nor containers of `with_parts` stay as they are, unless they have a method `to`.

    Args:
        batch: of any structure.
        device: the target device.
        move: moves each tensor of `tensors_in`; None: torch does.
    """
    # torch returns from an asynchronous copy to the host before its numbers have arrived
    move = move or (lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))
    return _mapped(batch, move, lambda other: other.to(device) if moves_itself(other) else other)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return a batch in new containers, with its tensors changed by a function, and other leaves by another."""
    if isinstance(batch, Tensor):
        return change(batch)
    if (tensors := plain_parts(batch)) is not None:
        return _like(batch, map(change, tensors))
    parts = batch if moves_itself(batch) else with_parts(batch, lambda part: _mapped(part, change, other))
    return other(batch) if parts is batch else parts


def moves_itself(batch: Any) -> bool:
    """Return whether an object has a method `to`: a packed sequence, a batch of transformers."""
    return callable(getattr(batch, "to", None))


def parts_of(batch: Any) -> Iterable[Any] | None:
    """Return the parts of a container of `with_parts`; None for any other object."""
    if isinstance(batch, Mapping):
        return batch.values()
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return batch if isinstance(batch, tuple | list) else None


_ALIGNMENT: Final = 512
"""Each tensor in a buffer starts at a multiple of this number of bytes, as torch's own allocations on CUDA do."""
_DEPTH: Final = 3
"""Buffers of a ring: the host fills one while another is copied, and the third waits on the device for its step."""


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies of this process to a device.

    torch keeps freed memory for the stream that allocated it, and gives out 32 streams of a priority in turn: with a
    stream for each evaluation, the device would hold the batches of 32. With the priority of the streams of saves, one
    of them would be this stream, and batches would wait for the save.

    Source: c10/cuda/CUDAStream.h, "Stream pool note".
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class CopyStream:
    """The stream of a CUDA device for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream_of(device)

    def buffer(self, size: int) -> Tensor:
        """Return (size,) uint8 page-locked memory of the host."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the host is page-locked already."""
        return tensor.is_pinned()

    def copy(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Begin a copy to the device; return the tensor there, and the event of its end."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = host.to(self._device, non_blocking=True)
            event.record(self._stream)
        return moved, event

    def join(self, moved: Tensor, event: torch.cuda.Event) -> None:
        """Let the stream of the kernels wait for an event; the memory of the tensor is kept until it has used it."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        moved.record_stream(current)


def mover_to(device: torch.device, *, pins: bool) -> Callable[[Any], Any]:
    """Return the function that moves batches to a device: to CUDA through a ring of page-locked buffers, if wanted.

    Example:
        >>> batch = torch.ones(2)
        >>> mover_to(torch.device("cpu"), pins=True)(batch) is batch
        True
    """
    if device.type == "cuda" and pins:
        return PinnedRing(CopyStream(device), device).move
    return partial(to_device, device=device)


class PinnedRing:
    """Moves the tensors of a step's batches to the device: one copy, whatever their number and structure.

    A buffer is filled again only after the copy from it has ended. Tensors that are already page-locked (those of
    worker processes) are copied directly. Tensors that are more than their bytes (sparse, nested, of another class,
    with a gradient) are copied as torch does it.

    Args:
        copies: the copy stream of the device.
        device: the target device of the batches.
        depth: number of buffers.
    """

    def __init__(self, copies: CopyStream, device: torch.device, *, depth: int = _DEPTH) -> None:
        self._copies, self._device = copies, device
        self._ring: deque[tuple[Tensor, torch.cuda.Event | None]] = deque([(copies.buffer(0), None)] * depth)
        """Page-locked buffers, the next one first, each with the end of the last copy from it."""

    def move(self, batch: Any) -> Any:
        """Return the batch, of any structure, on the device."""
        joint = [tensor for tensor in tensors_in(batch) if _is_plain(tensor) and not self._copies.is_pinned(tensor)]
        moved = dict(zip(map(id, joint), self._moved(joint), strict=True))

        def move(tensor: Tensor) -> Tensor:
            if id(tensor) in moved:
                return moved[id(tensor)]
            if not _is_plain(tensor):
                return tensor.to(self._device, non_blocking=True)
            copied, event = self._copies.copy(tensor)  # it is page-locked
            self._copies.join(copied, event)
            return copied

        return to_device(batch, self._device, move)

    def _moved(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pack tensors into the next buffer, copy it, and return views of the tensors in the copy."""
        if not tensors:
            return []
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer, copied = self._ring.popleft()
        if copied is not None:
            copied.synchronize()
        if buffer.numel() < end:
            buffer = self._copies.buffer(end)
        for tensor, start in zip(tensors, starts, strict=True):
            _view(buffer, start, tensor).copy_(tensor)
        moved, copied = self._copies.copy(buffer[:end])
        self._ring.append((buffer, copied))
        self._copies.join(moved, copied)
        return [_view(moved, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is one of the host that its bytes, dtype and shape describe."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return type(tensor) is Tensor and is_dense and tensor.device.type == "cpu" and not tensor.requires_grad


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a part of a buffer of bytes as a contiguous tensor with the dtype and shape of another."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


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
        self._copies: list[Any] | None = None
        self._accessed: dict[int, tuple[Any, list[tuple[Tensor, int]]]] = {}
        """Index -> the batch at its first access, in containers of this class, and the versions of its tensors."""
        self.were_changed = False
        """Whether a pass got a copy, because an earlier one had changed a batch."""

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return map(self._take, range(len(self._batches)))

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        chosen = range(len(self._batches))[index]
        return self._take(chosen) if isinstance(chosen, int) else [self._take(number) for number in chosen]

    def _take(self, index: int) -> Any:
        if index not in self._accessed:
            batch = self._batches[index]
            if self._keeps and self._copies is None:
                self._copies = [_copied(item) for item in self._batches]
            # `_version` has no public name
            tensors = plain_parts(batch) or _all_tensors(batch)
            versions = [(tensor, tensor._version) for tensor in tensors]  # noqa: SLF001
            self._accessed[index] = batch if tensors is batch else _mapped(batch, lambda tensor: tensor), versions
            return batch
        batch, versions = self._accessed[index]
        if all(tensor._version == version for tensor, version in versions):  # noqa: SLF001
            # a pass may have asked for the gradient of its input
            return _mapped(batch, lambda tensor: tensor.detach() if tensor.requires_grad else tensor)
        self.were_changed = True
        if self._copies is None:
            if self._read_again is None:
                return batch
            self._copies = list(self._read_again())
        return _copied(self._copies[index])


def _all_tensors(batch: Any) -> Iterator[Tensor]:
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        else:  # a mapping of transformers is a leaf that has parts
            yield from chain(_attributes(leaf), *map(_all_tensors, parts_of(leaf) or ()))


def _attributes(value: object) -> list[Tensor]:
    """Return the tensors that an object of another class holds."""
    return [part for part in getattr(value, "__dict__", {}).values() if isinstance(part, Tensor)]


def _copied(batch: Any) -> Any:
    """Return a copy in memory of its own."""
    return _mapped(batch, lambda tensor: tensor.detach().clone(), copy.deepcopy)
