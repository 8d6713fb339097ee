"""Splits of one training from datasets of any classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Splits:
    """A dataset for each split, each a node with its own `_target_`; only those nodes are built.

    Example:
        >>> node = {"train": {"_target_": "a.B"}, "val": None, "others": {"val_ood": {"_target_": "a.C"}}}
        >>> Splits.splits(node), Splits.node_of(node, "val_ood")
        (('train', 'val_ood'), {'_target_': 'a.C'})
    """

    train: Any
    """The dataset to train on."""
    val: Any = None
    """The dataset to validate on."""
    test: Any = None
    """The dataset to test on, once, at the end."""
    others: dict[str, Any] = field(default_factory=dict)
    """More splits by name: `val_NAME` is evaluated like `val`, `test_NAME` like `test`."""

    @classmethod
    def splits(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the splits that a node gives."""
        own = [name for name in ("train", "val", "test") if node.get(name) is not None]
        return (*own, *(node.get("others") or {}))

    @classmethod
    def node_of(cls, node: Mapping[str, Any], split: str) -> Mapping[str, Any]:
        """Return the node of the dataset of a split."""
        found: Mapping[str, Any] = {**(node.get("others") or {}), **node}[split]
        return found

    def __len__(self) -> int:
        """Return the number of training samples."""
        return len(self.train)

    def __getitem__(self, index: int) -> Any:
        """Return a training sample."""
        return self.train[index]
