"""Writing down what a constructor does to tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.numerics.deferred.fake_device import without_numbers
from trainkit.numerics.deferred.tape import CannotDeferError, Tape, TapeEntry, TensorVersion, memory

__all__ = ["Recorder"]

_OVERWRITING: Final = frozenset(
    {"normal_", "uniform_", "random_", "exponential_", "log_normal_", "geometric_", "cauchy_", "bernoulli_"}
)
"""Random operations that look at nothing of what they write to."""
_REFUSED: Final = frozenset({"set_", "resize_", "resize_as_", "set_source_storage"})
"""Operations that put other memory below a tensor."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, new tensors have no numbers, and what is done to them is written down.

    Tensors that already have numbers keep them (`torch.tensor([1.0])`, arrays of NumPy, what a file held), and one
    whose number is asked for (`.item()`, `.cpu()`) is made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._computing = False
        self._drawn_into = memory(0)
        self._tapes: dict[int, tuple[Tape, torch.UntypedStorage]] = {}  # the storage is held so that its number is its

    def tape_of(self, tensor: Tensor) -> Tape | None:
        """What was done to a tensor's memory; None for one that has numbers."""
        if not without_numbers(tensor):
            return None
        found = self._tapes.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity
        return None if found is None else found[0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation."""
        del types
        self._computing = True  # what torch itself asks of a tensor on the way is answered as it is
        try:
            return self._dispatched(func, args, kwargs or {})
        finally:
            self._computing = False

    def poses(self, tensor: Tensor) -> bool:
        """Whether a constructor is to take a tensor of the meta device for one of the CPU."""
        return not self._computing and self.tape_of(tensor) is not None

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        deferred = [tensor for tensor in tensors if self.tape_of(tensor) is not None]
        name = func.overloadpacket.__name__
        if any(without_numbers(tensor) and self.tape_of(tensor) is None for tensor in tensors):
            raise CannotDeferError(name)  # a tensor that the constructor itself has put on the meta device
        if tensors and not deferred:
            return func(*args, **kwargs)
        if name == "set_" and func._overloadname == "source_Tensor" and len(deferred) == len(tensors):  # noqa: SLF001
            return func(*args, **kwargs)  # it is a view of the other's memory from now on, and nothing was computed
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
        kwargs = _at_home(func, kwargs)
        noted_args, noted_kwargs = tree_map(self._noted, (args, kwargs))
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = (kwargs.get("generator") or torch.default_generator).get_state()
            results = self._drawn(func, name, args, kwargs)
        else:
            results = func(*tree_map(_without_numbers, args), **_on_meta(func, tree_map(_without_numbers, kwargs)))
        for tensor in written:
            tape = self.tape_of(tensor)
            assert tape is not None
            tape.entries.append(TapeEntry(func, noted_args, noted_kwargs, None, random=state))
        if written:
            return _given_back(func, args, kwargs, results)
        for place, made in enumerate(results if isinstance(results, tuple | list) else [results]):
            if isinstance(made, Tensor) and self.tape_of(made) is None:
                geometry = {"size": tuple(made.shape), "stride": made.stride()}
                entry = TapeEntry(func, noted_args, noted_kwargs, place, random=state, **geometry)
                self._begin(made, entry, dtype=made.dtype)
        return results

    def _begin(self, made: Tensor, entry: TapeEntry, *, dtype: torch.dtype) -> None:
        if "dtype" in entry.kwargs and entry.kwargs["dtype"] is None:
            entry.kwargs["dtype"] = dtype  # the default of that moment
        storage = made.untyped_storage()
        self._tapes[storage._cdata] = Tape(storage.nbytes(), [entry]), storage  # noqa: SLF001

    def _noted(self, value: Any) -> Any:
        """An argument as an entry keeps it."""
        if not isinstance(value, Tensor):
            return value
        tape = self.tape_of(value)
        return value.clone() if tape is None else TensorVersion.of(value, tape)

    def _drawn(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry a random operation out on temporary tensors, for what it does to the generator; results on meta."""

        def temporary(value: Any) -> Any:
            if name in _OVERWRITING and isinstance(value, Tensor) and value is args[0]:
                return self._scratch(value)
            return self._real(value)

        results = func(*tree_map(temporary, args), **tree_map(temporary, kwargs))
        return tree_map(_emptied, results)

    def _scratch(self, like: Tensor) -> Tensor:
        """Memory to draw into, of the looks of a tensor; the same for all, as large as the largest."""
        seen = TensorVersion(Tape(0), 0, tuple(like.shape), like.stride(), 0, like.dtype)
        length = sum((size - 1) * stride for size, stride in zip(seen.size, seen.stride, strict=True)) + 1
        needed = length * like.dtype.itemsize if like.numel() else 0
        if self._drawn_into.nbytes() < needed:
            self._drawn_into = memory(needed)
        return seen.on(self._drawn_into)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that an operation writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - has no public name
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _at_home(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation on the CPU, whatever device the constructor was told its tensors are on."""
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


def _given_back(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> Any:
    """What an operation that writes to an argument returns: that argument itself."""
    arguments = func._schema.arguments  # type: ignore[attr-defined]  # noqa: SLF001
    outputs = func._schema.returns  # type: ignore[attr-defined]  # noqa: SLF001
    if len(outputs) != 1 or outputs[0].alias_info is None:
        return results
    for place, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[place] if place < len(args) else kwargs[argument.name]
    return results
