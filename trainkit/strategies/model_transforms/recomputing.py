"""A forward pass that stores only its inputs (and optionally expensive results) and is recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit.numerics.generators import GeneratorStates
from trainkit.numerics.randomness import Drawing, Draws, keys_of
from trainkit.strategies.model_transforms.selective import selective_contexts
from trainkit.strategies.object_snapshot import ObjectSnapshot, refuse_changes


class Recomputed:
    """The recomputed forward pass of a module, which replaces its own: `module.forward = Recomputed(module)`.

    No module is wrapped, so names do not change. The recomputation draws the same random numbers as the first
    computation, even if another shard was computed in between, and leaves buffers unchanged.

    Args:
        selective: whether the results of matrix products, convolutions and attention are kept instead of recomputed.
    """

    def __init__(self, module: nn.Module, *, selective: bool = False) -> None:
        self.module, self.inner, self.selective = module, module.forward, selective
        self._draws = Drawing.of(module).most
        self._updated: list[tuple[nn.Module, str]] | None = None
        self._counts = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its inputs."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        before = self._buffers()
        given = ObjectSnapshot([("", (args, kwargs))]) if self._updated is None else None
        attributes = [ObjectSnapshot(self.module.named_modules())] if self._counts else []
        outputs = checkpoint(
            self.inner,
            *args,
            use_reentrant=False,
            preserve_rng_state=self._draws is not Draws.nothing,
            context_fn=self._contexts(before, attributes),
            **kwargs,
        )
        if given is not None:
            because = "and activation_checkpointing computes the block twice"
            block, otherwise = f"of the class {type(self.module).__name__}", "set activation_checkpointing=none"
            refuse_changes(given, block, because, otherwise=otherwise)
            self._counts = bool(attributes[0].changed())
            if not self._counts:
                attributes.clear()
            self._updated = _changed(self.module, before)
            # drop the entries that the recomputation does not need
            kept = {(id(owner), name) for owner, name in self._updated}
            before[:] = [entry for entry in before if (id(entry[0]), entry[1]) in kept]
        return outputs

    def _buffers(self) -> list[_Entry]:
        """Return copies of the buffers that a forward pass updates; of all buffers before the first pass."""
        chosen = _places(self.module) if self._updated is None else self._updated
        found = [(owner, name, owner._buffers[name]) for owner, name in chosen]  # noqa: SLF001
        return [(owner, name, buffer.detach().clone()) for owner, name, buffer in found if buffer is not None]

    def _contexts(
        self, before: list[_Entry], attributes: list[ObjectSnapshot]
    ) -> Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[None]]]:
        around: list[_Make] = [lambda: _as_before(before), lambda: _with_attributes(self.module, attributes)]
        keys = keys_of(self.module)
        if keys is not None:
            around.append(partial(keys.at, keys.moment))
        if self._draws is Draws.anything:
            around.append(GeneratorStates().again)
        keeping: AbstractContextManager[object] = nullcontext()
        if self.selective:
            keeping, returning = selective_contexts()
            around.append(lambda: returning)
        again = _Again(around)
        return lambda: (keeping, again)


class _Again:
    """The context of a recomputation; entered twice if backward runs separately for inputs and for weights."""

    def __init__(self, around: Sequence[_Make]) -> None:
        self._around = around
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for make in self._around:
            self._entered.enter_context(make())

    def __exit__(self, *raised: object) -> None:
        self._entered.close()


_Make = Callable[[], AbstractContextManager[object]]
"""Function that makes a context of a recomputation."""
_Entry = tuple[nn.Module, str, Tensor]
"""A buffer's module and name, and its earlier value."""


def _places(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (owner, name)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()  # noqa: SLF001 - has no public name
        if buffer is not None
    ]


def _changed(module: nn.Module, before: list[_Entry]) -> list[tuple[nn.Module, str]]:
    """Return the changed buffers, compared by value: batch normalisation does not change versions."""
    held = {(id(owner), name): tensor for owner, name, tensor in before}
    now = [(owner, name, owner._buffers[name]) for owner, name in _places(module)]  # noqa: SLF001
    return [
        (owner, name)
        for owner, name, buffer in now
        if (earlier := held.get((id(owner), name))) is None or buffer is None or not _equal(buffer, earlier)
    ]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


@contextmanager
def _with_attributes(module: nn.Module, before: list[ObjectSnapshot]) -> Iterator[None]:
    """Restore Python attributes that the first computation has changed, such as counters, for the block."""
    now = [ObjectSnapshot(module.named_modules()) for _ in before]
    for one in before:
        one.restore()
    try:
        yield
    finally:
        for one in now:
            one.restore()


@contextmanager
def _as_before(before: list[_Entry]) -> Iterator[None]:
    """Replace buffers by copies with their values before the first computation; backward may save the copies."""
    now = [owner._buffers[name] for owner, name, _ in before]  # noqa: SLF001
    for owner, name, tensor in before:
        owner._buffers[name] = tensor.clone()  # noqa: SLF001
    try:
        yield
    finally:
        for (owner, name, _), buffer in zip(before, now, strict=True):
            owner._buffers[name] = buffer  # noqa: SLF001
