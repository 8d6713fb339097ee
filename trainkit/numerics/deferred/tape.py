"""Record the operations on a storage, and replay them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_LARGE: Final = 1 << 20
_EMPTY: Final = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})


class CannotDeferError(Exception):
    """A constructor cannot be recorded; the model must be built normally."""


@dataclass(eq=False, slots=True)
class Tape:
    """One storage of a deferred model: the operations that produced its content, in order."""

    num_bytes: int
    entries: list[TapeEntry] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TensorVersion:
    """A tensor as an operation saw it: a view of a tape, after a number of its entries."""

    tape: Tape
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, tape: Tape) -> TensorVersion:
        """Return how a tensor of the meta device views its tape, in its current version."""
        geometry = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return cls(tape, len(tape.entries), *geometry, tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the same view of real memory."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def value(self) -> Tensor:
        """Compute the values, in new memory."""
        return self.on(_Replay().storage(self.tape, self.version))


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """An operation that wrote to a tape."""

    func: Any
    """An overload of an operator of torch."""
    args: tuple[Any, ...]
    """Arguments; tensors are stored as `TensorVersion`, or as copies if they had values."""
    kwargs: dict[str, Any]
    output: int | None
    """The index of the result that the tape is; None: the operation wrote to one of its arguments."""
    size: tuple[int, ...] = ()
    """Size of this result."""
    stride: tuple[int, ...] = ()
    random: Tensor | None = None
    """The state of the generator before the operation; None if it drew nothing."""


class _Replay:
    """Computes each storage once, however many operations read it."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], torch.UntypedStorage] = {}

    def storage(self, tape: Tape, version: int) -> torch.UntypedStorage:
        """Return the memory of a tape after `version` entries."""
        known = self._made.get((id(tape), version))
        if known is not None:
            return known
        storage = memory(tape.num_bytes)
        for place, entry in enumerate(tape.entries[:version]):
            storage = self._after(tape, place, entry, storage)
        self._made[id(tape), version] = storage
        return storage

    def _after(self, tape: Tape, place: int, entry: TapeEntry, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if entry.output is not None and entry.func.overloadpacket.__name__ in _EMPTY:
            return memory(tape.num_bytes)

        def real(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.clone()  # the operation may write to it
            if not isinstance(value, TensorVersion):
                return value
            if value.tape is tape and value.version == place:
                return value.on(storage)
            return value.on(self.storage(value.tape, value.version)).clone(memory_format=torch.preserve_format)

        args, kwargs = tree_map(real, (entry.args, entry.kwargs))
        results = replay_with_rng(entry.func, args, kwargs, entry.random)
        if entry.output is None:
            return storage
        made = _tensors(results)[entry.output]
        if made.stride() != entry.stride or made.storage_offset() or made.untyped_storage().nbytes() != tape.num_bytes:
            storage = memory(tape.num_bytes)
            TensorVersion(tape, 0, entry.size, entry.stride, 0, made.dtype).on(storage).copy_(made)
            return storage
        return made.untyped_storage()


def replay_with_rng(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], state: Tensor | None) -> Any:
    """Call an operation with the generator state of its first call; leave the generator itself unchanged."""
    if state is None:
        return func(*args, **kwargs)
    given = kwargs.get("generator")
    if given is not None:
        generator = torch.Generator()
        generator.set_state(state)
        return func(*args, **{**kwargs, "generator": generator})
    now = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    try:
        return func(*args, **kwargs)
    finally:
        torch.default_generator.set_state(now)


def memory(num_bytes: int) -> torch.UntypedStorage:
    """Allocate memory that returns to the system when it is freed.

    On the heap, the tensors that are kept would lie between the holes of freed ones, and a process would end with the
    size of the whole model.
    """
    if num_bytes < _LARGE:
        return torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()


def _tensors(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]
