"""Blocks that write into what they are given, where a strategy gives them copies or computes them twice."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainkit.errors import TrainingError
from trainkit.strategies.core.object_snapshot import ObjectSnapshot

__all__ = ["refuse_changes", "watch_first_call"]


def refuse_changes(given: ObjectSnapshot, block: str, because: str) -> None:
    """Raise an error where a block has changed a container or an object that it was given.

    Args:
        given: what its arguments held before its call.
        block: its name.
        because: why the change would be lost or made twice.

    Raises:
        TrainingError: it has.
    """
    kind = given.changed_class()
    if kind is not None:
        raise TrainingError(
            f"the block {block} changes the {kind} that it is given, {because}. Return what it adds, or use "
            "strategy=mirrored."
        )


def watch_first_call(module: nn.Module, block: str, because: str) -> None:
    """Hold the first call of a block to `refuse_changes`; the hooks are gone afterwards."""
    given: list[ObjectSnapshot] = []

    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(ObjectSnapshot([("", (args, kwargs))]))

    def after(_module: nn.Module, _args: Any, _kwargs: Any, _outputs: Any) -> None:
        for handle in handles:
            handle.remove()
        refuse_changes(given[-1], block, because)

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
