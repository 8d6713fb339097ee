"""Keep the results of some operations of a recomputed block: matrix products, convolutions and attention.

They take most of the time of a forward pass and make few of its tensors; the rest (norms, activations, dropout, casts)
makes many tensors in little time, and is recomputed.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` does not fit: it indexes every operation, which autocast's
cache of weight casts breaks; it allows one backward pass per forward pass, which a zero-bubble pipeline splits in two;
and it refuses a result that an in-place activation changes (docs/decisions/0040-own-selective-contexts.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from trainkit.errors import TrainkitError

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
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - has no public name
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
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
        found = func(*args, **(kwargs or {}))
        if func in _kept_operations() and not draws(func, args, kwargs or {}):
            kept = tree_map(_apart, found)
            self.results.append(_Result(func, kept, _versions(kept)))
        return found


class ReturnResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the kept results instead of running the operations of a recomputation; may be entered several times.

    A result that was changed in place after it was kept is computed again.
    """

    def __init__(self, kept: KeepResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._next = kept, 0

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
        number, results = self._next, self._kept.results
        self._next += 1
        if number >= len(results) or results[number].func is not func:
            raise TrainkitError(
                "activation_checkpointing=selective: a block runs different matrix products when it is recomputed. "
                "Use "
                "activation_checkpointing=full, or none."
            )
        result = results[number]
        if _versions(result.value) != result.versions:
            return func(*args, **(kwargs or {}))
        return tree_map(_apart, result.value)


def selective_contexts() -> tuple[KeepResults, ReturnResults]:
    """Return the contexts of a first computation and of its recomputations: `context_fn` of torch's `checkpoint`.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> layer, inputs = torch.nn.Linear(2, 2), torch.ones(1, 2)
        >>> out = checkpoint(lambda x: layer(x).tanh(), inputs, use_reentrant=False, context_fn=selective_contexts)
        >>> out.sum().backward()
    """
    kept = KeepResults()
    return kept, ReturnResults(kept)


def _apart(value: Any) -> Any:
    """Return an alias of a tensor without its gradient function, which shares its version counter."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
        return value.detach()


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in tree_iter(value) if isinstance(leaf, Tensor))  # noqa: SLF001
