"""Record the calls of one forward pass: of blocks, and of torch functions that the model's own code calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_map

from trainkit.strategies.maps.syntax import Block
from trainkit.strategies.pipeline.tracing.program import Modes, ParamRef, Program, RecordedCall, TensorMeta, Value
from trainkit.strategies.pipeline.tracing.python_state import CannotCut, PythonState, first_mutable, refused_object

_LOST: Final = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward"})
"""Methods of tensors with side effects and without a tensor result: a list of calls does not represent them."""


class Recorder(TorchFunctionMode):
    """Records the calls outside of blocks."""

    def __init__(self, model: nn.Module, own: Mapping[str, Tensor], inputs: Any, *, device_type: str) -> None:
        super().__init__()
        self._model, self._own, self._device_type = model, dict(own), device_type
        self._inside: set[str] = set()
        self._names: dict[int, Value | ParamRef] = {id(tensor): ParamRef(name) for name, tensor in own.items()}
        self._tensors: dict[Value | ParamRef, Tensor] = {ParamRef(name): tensor for name, tensor in own.items()}
        self._shapes: dict[int, TensorMeta] = {}
        self._calls: list[RecordedCall] = []
        self._written: dict[int, frozenset[int]] = {}
        self._depth = 1  # nothing is recorded before the model's own forward begins
        self._handles: list[Any] = []
        self._state: PythonState | None = None
        self._pending: Any = None
        self._ambient = self._modes()
        self._check("the model's input holds", inputs)
        tree_map(self._numbered, inputs)
        self._num_inputs = len(self._shapes)

    def watch(self, units: Sequence[Block]) -> None:
        """Register hooks on the model and on each of its blocks."""
        for unit in units:
            (module,) = unit.entries
            enter, leave = self._block_hooks(unit.name)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ]
        self._inside = {name for unit in units for name, _ in unit.tensors()}
        self._handles += [
            self._model.register_forward_pre_hook(lambda *_: self._begin(units), prepend=True),
            self._model.register_forward_hook(lambda *_: self._end()),
        ]

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, units: Sequence[Block]) -> None:
        self._state = PythonState(self._model, units)
        self._depth -= 1

    def _end(self) -> None:
        self._depth += 1
        assert self._state is not None
        self._state.at_the_end()
        for name, tensor in chain(self._model.named_parameters(), self._model.named_buffers()):
            if name not in self._inside and name in self._own and tensor is not self._own[name]:
                raise CannotCut(f"its own code replaces the tensor {name}")

    def _block_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._depth += 1
            if self._depth == 1:
                assert self._state is not None
                self._check(f"the block {name} is given", (args, kwargs))
                refs = self._refs(args), self._refs(kwargs)
                self._pending = refs, self._versions((args, kwargs)), self._modes()
                self._state.before_block(name, (args, kwargs))
                torch.set_grad_enabled(False)  # calls inside a block are recorded for backward by the block

        def leave(_module: nn.Module, _args: Any, _kwargs: Any, outputs: Any) -> None:
            if self._depth == 1:
                assert self._state is not None
                refs, versions, modes = self._pending
                torch.set_grad_enabled(modes.grad)
                self._state.after_block(name)
                self._check(f"the block {name} returns", outputs)
                self._note(_call(modes, self._ambient, refs, self._numbers(outputs), block=name), versions)
            self._depth -= 1

        return enter, leave

    def note_key(self, set_key: Callable[[], None]) -> None:
        """Record a call that sets the random key, for the model's own code; a block sets its own key."""
        if self._depth == 0:
            self._calls.append(RecordedCall(function=set_key))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, *, known_as: Any = None) -> Any:
        """Call a function, and record the call if the model's own code makes it."""
        if self._depth:
            return func(*args, **kwargs)
        self._depth += 1
        try:
            return self._recorded(func, args, kwargs, known_as or func)
        finally:
            self._depth -= 1

    def _recorded(self, func: Callable[..., Any], args: Any, kwargs: Any, known_as: Any) -> Any:
        assert self._state is not None
        title = _title(known_as)
        if getattr(func, "__name__", "") in _LOST:
            raise CannotCut(f"its own code calls {title} between its blocks")
        self._state.before_function(title)
        versions, modes = self._versions((args, kwargs)), self._modes()
        result = func(*args, **kwargs)
        made = any(isinstance(leaf, Tensor) for leaf in tree_flatten(result)[0])
        if made or (result is None and versions):
            self._check(f"its own code gives {title}", (args, kwargs))
            refs = self._refs(args), self._refs(kwargs)
            outputs = self._numbers(result) if made else None
            self._note(_call(modes, self._ambient, refs, outputs, function=known_as), versions)
        return result

    def _modes(self) -> Modes:
        on = torch.is_autocast_enabled(self._device_type)
        dtype = torch.get_autocast_dtype(self._device_type) if on else None
        return Modes(grad=torch.is_grad_enabled(), device_type=self._device_type, autocast=dtype)

    def _check(self, where: str, tree: Any) -> None:
        found = first_mutable(tree)
        if found is not None:
            raise refused_object(where, found, self._model)

    def _note(self, call: RecordedCall, before: dict[Value | ParamRef, int]) -> None:
        written = {ref for ref, version in before.items() if self._tensors[ref]._version != version}  # noqa: SLF001 - has no public name
        owned = sorted(ref.name for ref in written if isinstance(ref, ParamRef) and ref.name not in self._inside)
        if owned and call.block is None:
            raise CannotCut(
                f"its own code writes into {owned[0]} between its blocks",
                remedy="Move the tensor and that code into a block, or use strategy=mirrored.",
            )
        storages = {_storage(self._tensors[ref]) for ref in written}
        if storages:
            self._written[len(self._calls)] = frozenset(
                ref.number
                for ref, tensor in self._tensors.items()
                if isinstance(ref, Value) and _storage(tensor) in storages
            )
        self._calls.append(call)

    def _versions(self, tree: Any) -> dict[Value | ParamRef, int]:
        refs = ((leaf, self._names.get(id(leaf))) for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor))
        return {ref: leaf._version for leaf, ref in refs if ref is not None}  # noqa: SLF001

    def _refs(self, tree: Any) -> Any:
        return tree_map(self._ref, tree)

    def _ref(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        known = self._names.get(id(leaf))
        if known is None and is_fake(leaf):
            raise CannotCut(
                "its own code uses a tensor that no call returned: an attribute or an object has kept it",
                remedy="Return it from the block that creates it, or use strategy=mirrored.",
            )
        return leaf if known is None else known  # a tensor of the model that is neither a parameter nor a buffer

    def _numbers(self, tree: Any) -> Any:
        return tree_map(self._numbered, tree)

    def _numbered(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._names:
            value = Value(len(self._shapes))
            self._names[id(leaf)] = value
            self._tensors[value] = leaf  # kept alive, so that no other tensor gets its id
            self._shapes[value.number] = TensorMeta(tuple(leaf.shape), leaf.dtype)
        return self._names[id(leaf)]

    def program(self, outputs: Any) -> Program:
        """Return the recorded program."""
        self._check("it returns", outputs)
        return Program(
            calls=tuple(self._calls),
            num_inputs=self._num_inputs,
            outputs=self._refs(outputs),
            shapes=self._shapes,
            written=self._written,
            storages={ref.number: _storage(one) for ref, one in self._tensors.items() if isinstance(ref, Value)},
        )


def is_fake(value: Any) -> bool:
    """Return whether a value is a tensor of a recorded pass, which has no data."""
    return type(value).__name__ == "FakeTensor"  # importing the class would slow every start


@dataclass(frozen=True)
class _Applied:
    """A user's `autograd.Function`, with its own backward pass."""

    kind: type[Function]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def whole_functions(recorder: Recorder) -> Iterator[None]:
    """Record an `autograd.Function` as one call: its operations alone would lose its backward pass."""
    plain = Function.__dict__["apply"]

    def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        run = plain.__get__(None, kind)
        if kind.__module__ == "torch.utils.checkpoint":  # it calls blocks, which are recorded themselves
            return run(*args, **kwargs)
        return recorder.call(run, args, kwargs, known_as=_Applied(kind))

    Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Function.apply = plain  # type: ignore[method-assign]


def _call(
    modes: Modes, ambient: Modes, refs: Any, outputs: Any, *, block: str | None = None, function: Any = None
) -> RecordedCall:
    args, kwargs = refs
    held = None if modes == ambient else modes
    return RecordedCall(block=block, function=function, args=args, kwargs=kwargs, outputs=outputs, modes=held)


def _title(func: Any) -> str:
    if isinstance(func, _Applied):
        return func.kind.__qualname__
    return str(resolve_name(func) or getattr(func, "__name__", type(func).__name__))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - fake tensors have no address
