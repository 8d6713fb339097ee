"""A forward pass that stores only its inputs (and optionally expensive results) and is recomputed in backward.

Selective: keep the results of some operations of a recomputed block: matrix products, convolutions and attention.

They take most of the time of a forward pass and make few of its tensors; the rest (norms, activations, dropout, casts)
makes many tensors in little time, and is recomputed.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` does not fit: it indexes every operation, which autocast's
cache of weight casts breaks; it allows one backward pass per forward pass, which a zero-bubble pipeline splits in two;
and it refuses a result that an in-place activation changes (docs/decisions/0040-own-selective-contexts.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.checkpoint import checkpoint

from trainkit.errors import TrainkitError
from trainkit.numerics.generators import GeneratorStates
from trainkit.numerics.randomness import Drawing, Draws, keys_of
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
        arguments = ObjectSnapshot([("", (args, kwargs))]) if self._updated is None else None
        attributes = [ObjectSnapshot(self.module.named_modules())] if self._counts else []
        outputs = checkpoint(
            self.inner,
            *args,
            use_reentrant=False,
            preserve_rng_state=self._draws is not Draws.nothing,
            context_fn=self._contexts(before, attributes),
            **kwargs,
        )
        if arguments is not None:
            because = "and activation_checkpointing computes the block twice"
            block, otherwise = f"of the class {type(self.module).__name__}", "set activation_checkpointing=none"
            refuse_changes(arguments, block, because, otherwise=otherwise)
            self._counts = bool(attributes[0].changed())
            if not self._counts:
                attributes.clear()
            self._updated = _changed(self.module, before)
            # drop the entries that the recomputation does not need
            updated = {(id(owner), name) for owner, name in self._updated}
            before[:] = [entry for entry in before if (id(entry[0]), entry[1]) in updated]
        return outputs

    def _buffers(self) -> list[_Entry]:
        """Return copies of the buffers that a forward pass updates; of all buffers before the first pass."""
        chosen = _buffers_of(self.module) if self._updated is None else self._updated
        buffers = [(owner, name, owner._buffers[name]) for owner, name in chosen]  # noqa: SLF001
        return [(owner, name, buffer.detach().clone()) for owner, name, buffer in buffers if buffer is not None]

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
        again = _RecomputeContext(around)
        return lambda: (keeping, again)


class _RecomputeContext:
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


def _buffers_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (owner, name)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()  # noqa: SLF001 - has no public name
        if buffer is not None
    ]


def _changed(module: nn.Module, before: list[_Entry]) -> list[tuple[nn.Module, str]]:
    """Return the changed buffers, compared by value: batch normalisation does not change versions."""
    values = {(id(owner), name): tensor for owner, name, tensor in before}
    after = [(owner, name, owner._buffers[name]) for owner, name in _buffers_of(module)]  # noqa: SLF001
    return [
        (owner, name)
        for owner, name, buffer in after
        if (earlier := values.get((id(owner), name))) is None
        or buffer is None
        or buffer.shape != earlier.shape
        or not torch.equal(buffer, earlier)
    ]


@contextmanager
def _with_attributes(module: nn.Module, before: list[ObjectSnapshot]) -> Iterator[None]:
    """Restore Python attributes that the first computation has changed, such as counters, for the block."""
    after = [ObjectSnapshot(module.named_modules()) for _ in before]
    for snapshot in before:
        snapshot.restore()
    try:
        yield
    finally:
        for snapshot in after:
            snapshot.restore()


@contextmanager
def _as_before(before: list[_Entry]) -> Iterator[None]:
    """Replace buffers by copies with their values before the first computation; backward may save the copies."""
    after = [owner._buffers[name] for owner, name, _ in before]  # noqa: SLF001
    for owner, name, tensor in before:
        owner._buffers[name] = tensor.clone()  # noqa: SLF001
    try:
        yield
    finally:
        for (owner, name, _), buffer in zip(before, after, strict=True):
            owner._buffers[name] = buffer  # noqa: SLF001


_NAMES: Final = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


@cache
def _kept_operations() -> frozenset[object]:
    """Return the operations whose results are kept; some versions of torch lack some of them."""
    packets = (getattr(torch.ops.aten, name, None) for name in _NAMES)
    return frozenset(packet.default for packet in packets if packet is not None)


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an attention operation drops scores at random.

    Such a call is recomputed. Reusing a kept result would skip its random draws, and later draws of the block would
    change.

    Example:
        >>> flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        >>> draws(flash, (None, None, None, 0.1), {}), draws(flash, (None, None, None), {})
        (True, False)
    """
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - has no public name
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return False


class _Result(NamedTuple):
    func: Callable[..., Any]
    value: Any
    """The result, whose tensors have no gradient function."""
    versions: tuple[int, ...]
    """Version counter (`_version`) of each tensor when it was kept."""


class KeepResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of expensive operations of a forward pass, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[_Result] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and keep its result if it is an expensive one."""
        result = func(*args, **(kwargs or {}))
        if func in _kept_operations() and not draws(func, args, kwargs or {}):
            alias = tree_map(_alias, result)
            self.results.append(_Result(func, alias, _versions(alias)))
        return result


class ReturnResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the kept results instead of running the operations of a recomputation; may be entered several times.

    A result that was changed in place after it was kept is computed again.
    """

    def __init__(self, first_pass: KeepResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first_pass, self._next = first_pass, 0

    def __enter__(self) -> Self:
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the kept result of an expensive operation; run all other operations.

        Raises:
            TrainkitError: the block runs different operations from its first computation.
        """
        if func not in _kept_operations() or draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        number, results = self._next, self._first_pass.results
        self._next += 1
        if number >= len(results) or results[number].func is not func:
            raise TrainkitError(
                "activation_checkpointing=selective: a block runs different matrix products when it is recomputed. "
                "Use activation_checkpointing=full, or none."
            )
        result = results[number]
        if _versions(result.value) != result.versions:
            return func(*args, **(kwargs or {}))
        return tree_map(_alias, result.value)


def selective_contexts() -> tuple[KeepResults, ReturnResults]:
    """Return the contexts of a first computation and of its recomputations: `context_fn` of torch's `checkpoint`.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> layer, inputs = torch.nn.Linear(2, 2), torch.ones(1, 2)
        >>> out = checkpoint(lambda x: layer(x).tanh(), inputs, use_reentrant=False, context_fn=selective_contexts)
        >>> out.sum().backward()
    """
    first_pass = KeepResults()
    return first_pass, ReturnResults(first_pass)


def _alias(value: Any) -> Any:
    """Return an alias of a tensor without its gradient function, which shares its version counter."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
        return value.detach()


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in tree_iter(value) if isinstance(leaf, Tensor))  # noqa: SLF001
