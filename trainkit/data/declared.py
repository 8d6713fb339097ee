"""The splits of a run as their classes declare them, for a plan that opens no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Generator

from trainkit.config.sections import CvConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import resolve_target
from trainkit.config.targets.kinds import PLACES
from trainkit.data.declaration import Declared
from trainkit.data.hooks import class_node
from trainkit.data.splits import folded, splits_of
from trainkit.errors import ConfigError, Problem


class DeclaredLength:
    """A split with a length but without samples: they are unknown."""

    is_declared = True
    """Whether a user's function that reads the data must not be called with this split."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count


class DeclaredSplit(DeclaredLength):
    """A split of made-up samples; the same index always gives the same sample."""

    def __init__(self, declared: Declared, count: int | None = None) -> None:
        super().__init__(declared.num_samples or count or 1)
        self._draw = declared.draw
        self.stored_bytes = declared.stored_bytes
        """Bytes of a sample as copied to the device; None: as in a made-up one."""

    def __getitem__(self, index: int) -> Any:
        """Return a made-up sample."""
        assert self._draw is not None
        return self._draw(Generator().manual_seed(index))


@dataclass(frozen=True, kw_only=True)
class DeclaredData:
    """The splits of a `data` node without their data."""

    splits: Mapping[str, Any]
    """Split -> a dataset with made-up samples, or only with a length."""
    knows_length: bool
    """Whether the length of the training split is known; otherwise the plan assumes an arbitrary one."""
    notes: tuple[str, ...] = field(default=())
    """Unknown facts, and the flags that supply them."""


def declared_data(
    node: Mapping[str, Any],
    cv: CvConfig,
    *,
    num_samples: int | None = None,
    unknown_length: int = 1,
    ends: bool = False,
) -> DeclaredData:
    """Return the splits that a `data` node declares; reads no file.

    Args:
        node: the `data` group.
        cv: the folds.
        num_samples: length of the training split, if its class declares none.
        unknown_length: the length to plan with if neither is known.
        ends: whether the number of steps is known without the length.

    Raises:
        ConfigError: `num_samples` is given, and the class declares another length.

    Example:
        >>> found = declared_data({"_target_": "trainkit.data.Digits"}, CvConfig())
        >>> {name: len(split) for name, split in found.splits.items()}
        {'train': 1437, 'val': 360}
    """
    node = class_node(node)
    declared = {split: _declared(node, split) for split in splits_of(node)}
    train, name = declared["train"], str(node[TARGET]).rpartition(".")[2]
    if num_samples is not None and train.num_samples not in (None, num_samples):
        rule = f"{name} declares {train.num_samples:,} training samples. Leave the flag out."
        raise ConfigError([Problem(key="--num-samples", value=num_samples, rule=rule, origin="command line")])
    length = train.num_samples or num_samples
    notes = []
    if length is None:
        lost = "the steps of an epoch are" if ends else "the number of steps, and time and cost to the end, are"
        notes.append(
            f"data: {name} does not declare its length, and no data is opened: {lost} left out. --num-samples N gives "
            "it."
        )
    if train.draw is None:
        notes.append(
            f"data: {name} does not declare its samples, and no data is opened: activations, and the check that model "
            "and data fit, are left out. --open-data reads the data."
        )
    splits: dict[str, Any] = {}
    for split, one in declared.items():
        count = one.num_samples or (length if split == "train" else None) or unknown_length
        splits[split] = DeclaredLength(count) if one.draw is None else DeclaredSplit(one, count)
    if cv.folds is not None:
        splits = _folded(splits, cv)
    return DeclaredData(splits=splits, knows_length=length is not None, notes=tuple(notes))


def _folded(splits: dict[str, Any], cv: CvConfig) -> dict[str, Any]:
    train = splits["train"]
    if isinstance(train, DeclaredSplit):
        return dict(folded(splits, cv))
    assert cv.folds is not None
    held_out = len(train) // cv.folds
    rest = {name: split for name, split in splits.items() if name not in ("train", "val")}
    return {"train": DeclaredLength(len(train) - held_out), "val": DeclaredLength(held_out), **rest}


def _declared(node: Mapping[str, Any], split: str) -> Declared:
    """Return the declaration of the class of a node with the given keys."""
    target = resolve_target(node[TARGET], PLACES["data"])
    if (of_split := getattr(target, "node_of", None)) is not None:
        return _declared(of_split(node, split), split)
    declare = getattr(target, "declare", None)
    if declare is None:
        return Declared()
    keys = {key: value for key, value in node.items() if key != TARGET and value != "???"}
    found: Declared = declare(keys, split)
    return found
