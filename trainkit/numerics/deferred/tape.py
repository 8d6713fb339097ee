"""What was done to a piece of memory, and doing it again."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["CannotDeferError", "Tape", "TapeEntry", "TensorVersion", "memory", "replay_with_rng"]

_LARGE: Final = 1 << 20
_EMPTY: Final = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})


class CannotDeferError(Exception):
    """A constructor does what cannot be written down; the model has to be built whole."""


@dataclass(eq=False, slots=True)
class Tape:
    """One storage of a deferred model: the operations that made what it holds, in order."""

    num_bytes: int
    entries: list[TapeEntry] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TensorVersion:
    """A tensor as an operation saw it: a view of a tape, after so many of its entries."""

    tape: Tape
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, tape: Tape) -> TensorVersion:
        """How a tensor of the meta device looks at its tape, as that is now."""
        geometry = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return cls(tape, len(tape.entries), *geometry, tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view of real memory."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def value(self) -> Tensor:
        """Its numbers, made now, in memory of their own."""
        return self.on(_Replay().storage(self.tape, self.version))


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """An operation that wrote to a tape."""

    func: Any
    """An overload of an operator of torch."""
    args: tuple[Any, ...]
    """Tensors stand as `Seen`, or as copies where they were real."""
    kwargs: dict[str, Any]
    output: int | None
    """Which of the results the tape is; None: the operation wrote to one of its arguments."""
    size: tuple[int, ...] = ()
    """Of that result."""
    stride: tuple[int, ...] = ()
    random: Tensor | None = None
    """The state of the generator before; None where it drew nothing."""


class _Replay:
    """Makes storages once each, however many operations read them."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], torch.UntypedStorage] = {}

    def storage(self, tape: Tape, version: int) -> torch.UntypedStorage:
        """The memory of a tape after `version` entries."""
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
                return value.clone()  # an operation may write to it
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
    """Call an operation with the generator as it was before it was first called; the generator itself stays."""
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
    """Memory that goes back to the system when it is let go.

    From the heap, what is kept of each tensor would lie between the holes that the tensors left, and a process would
    end with the whole model's size.
    """
    if num_bytes < _LARGE:
        return torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()


def _tensors(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]
