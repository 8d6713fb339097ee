"""Record the tensor operations of a constructor, and replay them."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, SupportsIndex

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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
    """A tensor at the time of an operation: a view of a tape after a number of its entries."""

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


_DEVICE: Any = torch._C.TensorBase.device  # noqa: SLF001 - the property that is hidden inside `fake_cpu_device`


def without_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor is really on the meta device, whatever it reports."""
    return bool(_DEVICE.__get__(tensor).type == "meta")


@contextmanager
def fake_cpu_device(fakes_cpu: Callable[[Tensor], bool]) -> Iterator[None]:
    """Let tensors of the meta device for which `fakes_cpu` holds report the CPU inside of the block.

    `nn.init` skips tensors on the meta device (`trunc_normal_`, `orthogonal_`), and a constructor may do the same; then
    no operation would be recorded, and the values would differ. Torch's own modules still see the real device, which
    they use to allocate. Pickling such a tensor is refused.
    """

    def is_meta(tensor: Tensor) -> bool:
        return without_numbers(tensor) and not fakes_cpu(tensor)

    def device(tensor: Tensor) -> torch.device:
        found: torch.device = _DEVICE.__get__(tensor)
        if found.type != "meta" or not fakes_cpu(tensor):
            return found
        asking = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - has no public name
        return found if asking == "torch" or asking.startswith("torch.") else torch.device("cpu")

    def reduce(tensor: Tensor, protocol: SupportsIndex) -> Any:
        if without_numbers(tensor) and fakes_cpu(tensor):
            raise CannotDeferError("pickle")  # torch would read memory that the tensor does not have
        return pickled(tensor, protocol)

    pickled: Callable[[Tensor, SupportsIndex], Any] = Tensor.__reduce_ex__
    Tensor.is_meta, Tensor.device = property(is_meta), property(device)  # type: ignore[assignment]
    Tensor.__reduce_ex__ = reduce  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Tensor.is_meta, Tensor.device
        Tensor.__reduce_ex__ = pickled  # type: ignore[method-assign]


_OVERWRITING: Final = frozenset(
    {"normal_", "uniform_", "random_", "exponential_", "log_normal_", "geometric_", "cauchy_", "bernoulli_"}
)
"""Random operations that do not read the tensor they write to."""
_REFUSED: Final = frozenset({"set_", "resize_", "resize_as_", "set_source_storage"})
"""Operations that replace the memory of a tensor."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, new tensors have no values, and operations on them are recorded.

    Tensors that already have values keep them (`torch.tensor([1.0])`, NumPy arrays, content of a file); a tensor whose
    value is read (`.item()`, `.cpu()`) is computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._computing = False
        self.refused: str | None = None
        """The operation that could not be recorded, whose error the constructor may have caught."""
        self._drawn_into = memory(0)
        self._tapes: dict[
            int, tuple[Tape, torch.UntypedStorage]
        ] = {}  # keeps the storage alive, so that its id stays unique

    def tape_of(self, tensor: Tensor) -> Tape | None:
        """Return the recorded operations on a tensor's memory; None for a tensor with values."""
        if not without_numbers(tensor):
            return None
        found = self._tapes.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity
        return None if found is None else found[0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record or run an operation; torch calls this for every one."""
        del types
        self._computing = True  # meanwhile, torch itself sees the real device
        try:
            return self._dispatched(func, args, kwargs or {})
        except (CannotDeferError, NotImplementedError):  # the latter: there is no kernel without values
            self.refused = func.overloadpacket.__name__
            raise
        finally:
            self._computing = False

    def fakes_cpu(self, tensor: Tensor) -> bool:
        """Return whether a constructor should see a tensor of the meta device as one of the CPU."""
        return not self._computing and self.tape_of(tensor) is not None

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        deferred = [tensor for tensor in tensors if self.tape_of(tensor) is not None]
        name = func.overloadpacket.__name__
        if any(without_numbers(tensor) and self.tape_of(tensor) is None for tensor in tensors):
            raise CannotDeferError(name)  # the constructor itself put a tensor on the meta device
        if tensors and not deferred:
            return func(*args, **kwargs)
        if name == "set_" and func._overloadname == "source_Tensor" and len(deferred) == len(tensors):  # noqa: SLF001
            return func(*args, **kwargs)  # it is now a view of the other's memory; nothing was computed
        if name in _REFUSED:
            raise CannotDeferError(name)
        written = _written(func, args, kwargs)
        leaves_meta = name == "_local_scalar_dense" or torch.device(kwargs.get("device") or "meta").type == "cpu"
        if deferred and (leaves_meta or any(self.tape_of(tensor) is None for tensor in written)):
            return func(*tree_map(self._real, args), **tree_map(self._real, kwargs))
        return self._deferred(func, name, args, kwargs, written)

    def _real(self, value: Any) -> Any:
        tape = self.tape_of(value) if isinstance(value, Tensor) else None
        return value if tape is None else TensorVersion.of(value, tape).value()

    def _deferred(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]
    ) -> Any:
        kwargs = _with_cpu_device(func, kwargs)
        recorded_args, recorded_kwargs = tree_map(self._recorded, (args, kwargs))
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = (kwargs.get("generator") or torch.default_generator).get_state()
            results = self._run_random(func, name, args, kwargs)
        else:
            results = func(*tree_map(_without_numbers, args), **_on_meta(func, tree_map(_without_numbers, kwargs)))
        for tensor in written:
            tape = self.tape_of(tensor)
            assert tape is not None
            tape.entries.append(TapeEntry(func, recorded_args, recorded_kwargs, None, random=state))
        if written:
            return _written_argument(func, args, kwargs, results)
        for place, made in enumerate(results if isinstance(results, tuple | list) else [results]):
            if isinstance(made, Tensor) and self.tape_of(made) is None:
                geometry = {"size": tuple(made.shape), "stride": made.stride()}
                entry = TapeEntry(func, recorded_args, recorded_kwargs, place, random=state, **geometry)
                self._begin(made, entry, dtype=made.dtype)
        return results

    def _begin(self, made: Tensor, entry: TapeEntry, *, dtype: torch.dtype) -> None:
        if "dtype" in entry.kwargs and entry.kwargs["dtype"] is None:
            entry.kwargs["dtype"] = dtype  # the default at this time
        storage = made.untyped_storage()
        self._tapes[storage._cdata] = Tape(storage.nbytes(), [entry]), storage  # noqa: SLF001

    def _recorded(self, value: Any) -> Any:
        """Return an argument in the form in which an entry stores it."""
        if not isinstance(value, Tensor):
            return value
        tape = self.tape_of(value)
        return value.clone() if tape is None else TensorVersion.of(value, tape)

    def _run_random(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a random operation on temporary tensors to advance the generator; return results on the meta device."""

        def temporary(value: Any) -> Any:
            if name in _OVERWRITING and isinstance(value, Tensor) and value is args[0]:
                return self._scratch(value)
            return self._real(value)

        results = func(*tree_map(temporary, args), **tree_map(temporary, kwargs))
        return tree_map(_emptied, results)

    def _scratch(self, like: Tensor) -> Tensor:
        """Return memory to draw into with the shape of a tensor; shared by all, as large as the largest."""
        seen = TensorVersion(Tape(0), 0, tuple(like.shape), like.stride(), 0, like.dtype)
        length = sum((size - 1) * stride for size, stride in zip(seen.size, seen.stride, strict=True)) + 1
        needed = length * like.dtype.itemsize if like.numel() else 0
        if self._drawn_into.nbytes() < needed:
            self._drawn_into = memory(needed)
        return seen.on(self._drawn_into)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - has no public name
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _with_cpu_device(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation with the CPU as device, whatever device the constructor saw."""
    if not any(argument.name == "device" for argument in func._schema.arguments):  # noqa: SLF001
        return kwargs
    device = torch.device(kwargs.get("device") or "cpu").type
    if device not in ("cpu", "meta"):
        raise CannotDeferError(device)
    return {**kwargs, "device": torch.device("cpu")}


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if any(argument.name == "device" for argument in func._schema.arguments):  # noqa: SLF001
        return {**kwargs, "device": torch.device("meta")}
    return kwargs


def _without_numbers(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _emptied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _written_argument(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> Any:
    """Return the argument that an operation writes to as its result."""
    arguments = func._schema.arguments  # type: ignore[attr-defined]  # noqa: SLF001
    outputs = func._schema.returns  # type: ignore[attr-defined]  # noqa: SLF001
    if len(outputs) != 1 or outputs[0].alias_info is None:
        return results
    for place, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs[argument.name]
    return results
