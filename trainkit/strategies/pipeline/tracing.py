"""Seeing what a model does, from a forward pass without numbers: which blocks run, and what lies between.

The pass is run on tensors that have shapes and no memory. Calls of blocks are noted as a whole, and so is each function
of torch that the model's own code calls between them. What comes out is what the model has done, not what its classes
say: blocks may branch, take several inputs, and be declared in any order. It holds for inputs of the same shapes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from trainkit.numerics.generators import HostStates
from trainkit.numerics.randomness import noting_keys
from trainkit.strategies.maps.units import Unit
from trainkit.strategies.pipeline.program import Call, Held, Program, Shape, Value

__all__ = ["CannotCut", "trace"]


class CannotCut(Exception):  # noqa: N818 - the reason why, which becomes a problem or an error elsewhere
    """A forward pass that cannot be written down."""


def trace(
    model: nn.Module,
    units: Sequence[Unit],
    inputs: Any,
    *,
    device: torch.device,
    autocast: AbstractContextManager[Any],
) -> Program:
    """Write down what a model does; nothing is computed, and the model is left as it was.

    Args:
        model: may be on the meta device, in part or in whole.
        units: its blocks, of `blocks_to_cut`.
        inputs: what it is called with: tensors, or tuples, lists and dicts of them; only their shapes matter.
        device: where it shall compute.
        autocast: the context of its forward pass.

    Raises:
        CannotCut: it needs numbers on the way, or gives what is not made of tensors.
    """
    # Heavy, and needed where there are stages only.
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # what is compiled runs as it is written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_log("torch._subclasses.fake_tensor"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        own = {
            name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
        }
        shaped = tree_map(lambda leaf: _without_numbers(leaf, device), inputs)
        recorder = _Recorder(own, shaped)
        stack.callback(recorder.release)
        recorder.watch(model, units)
        stack.enter_context(noting_keys(recorder.note_key))
        stack.enter_context(autocast)
        stack.enter_context(recorder)
        host = HostStates.now()
        try:
            outputs = functional_call(model, own, (shaped,))
        except CannotCut:
            raise
        except Exception as error:
            said = (str(error).strip() or "it failed").splitlines()[0].rstrip(".")
            raise CannotCut(f"{type(error).__name__}: {said}") from error
        if host.moved():
            raise CannotCut(
                "its forward draws from Python's random or NumPy, which are keyed by shard and not by block"
            )
    return recorder.program(outputs)


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """What fails is told by the error: torch would log each traceback first."""
    logger = logging.getLogger(name)
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _without_numbers(leaf: Any, device: torch.device) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, Tensor) else leaf


class _Recorder(TorchFunctionMode):
    """Notes the calls that happen outside of blocks."""

    def __init__(self, own: Mapping[str, Tensor], inputs: Any) -> None:
        super().__init__()
        self._own = dict(own)
        self._names: dict[int, Value | Held] = {id(tensor): Held(name) for name, tensor in own.items()}
        self._kept: list[Tensor] = [*own.values()]  # alive, so that no other tensor gets its id
        self._shapes: dict[int, Shape] = {}
        self._calls: list[Call] = []
        self._written: dict[int, frozenset[int]] = {}
        self._tensors: dict[int, Tensor] = {}
        self._depth = 1  # nothing counts before the model's own forward begins
        self._handles: list[Any] = []
        self._pending: tuple[Any, Any, dict[int, int]] = ((), {}, {})
        tree_map(self._numbered, inputs)
        self._num_inputs = len(self._shapes)

    def watch(self, model: nn.Module, units: Sequence[Unit]) -> None:
        """Look on at the model and at each of its blocks."""
        for unit in units:
            (module,) = unit.entries
            enter, leave = self._block_hooks(unit.name)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ]
        inside = {name for unit in units for name, _ in unit.tensors()}
        self._handles += [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(lambda *_: self._end(model, inside)),
        ]

    def release(self) -> None:
        """Look away."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self._depth -= 1

    def _end(self, model: nn.Module, inside: set[str]) -> None:
        self._depth += 1
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if name not in inside and name in self._own and tensor is not self._own[name]:
                raise CannotCut(f"its own code puts another tensor in the place of {name}")

    def _block_hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._depth == 0:
                self._pending = self._refs(args), self._refs(kwargs), self._versions((args, kwargs))
            self._depth += 1

        def leave(_module: nn.Module, _args: Any, _kwargs: Any, outputs: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                args, kwargs, versions = self._pending
                self._note(Call(block=name, args=args, kwargs=kwargs, outputs=self._numbers(outputs)), versions)

        return enter, leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        versions = self._versions((args, kwargs))
        result = func(*args, **kwargs)
        made = any(isinstance(leaf, Tensor) for leaf in tree_flatten(result)[0])
        if made or (result is None and versions):
            refs = self._refs(args), self._refs(kwargs)
            self._note(
                Call(function=func, args=refs[0], kwargs=refs[1], outputs=self._numbers(result) if made else None),
                versions,
            )
        return result

    def note_key(self, set_key: Callable[[], None]) -> None:
        """Set the key in every pass, where the model's own code goes on with it; a block sets its own."""
        if self._depth == 0:
            self._calls.append(Call(function=set_key))

    def _note(self, call: Call, before: dict[int, int]) -> None:
        after = {number: self._tensors[number]._version for number in before}  # noqa: SLF001 - has no public name
        written = frozenset(number for number, version in after.items() if version != before[number])
        if written:
            self._written[len(self._calls)] = written
        self._calls.append(call)

    def _versions(self, tree: Any) -> dict[int, int]:
        refs = ((leaf, self._names.get(id(leaf))) for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor))
        return {ref.number: leaf._version for leaf, ref in refs if isinstance(ref, Value)}  # noqa: SLF001

    def _refs(self, tree: Any) -> Any:
        return tree_map(self._ref, tree)

    def _ref(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        known = self._names.get(id(leaf))
        if known is None and type(leaf).__name__ == "FakeTensor":
            raise CannotCut("a tensor goes from block to block inside of something that is no tuple, list or dict")
        return leaf if known is None else known  # one that the model keeps beside its parameters and buffers

    def _numbers(self, tree: Any) -> Any:
        return tree_map(self._numbered, tree)

    def _numbered(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._names:
            number = len(self._shapes)
            self._names[id(leaf)] = Value(number)
            self._kept.append(leaf)
            self._tensors[number] = leaf
            self._shapes[number] = Shape(tuple(leaf.shape), leaf.dtype)
        return self._names[id(leaf)]

    def program(self, outputs: Any) -> Program:
        """What was noted."""
        return Program(
            calls=tuple(self._calls),
            num_inputs=self._num_inputs,
            outputs=self._refs(outputs),
            shapes=self._shapes,
            written=self._written,
        )
