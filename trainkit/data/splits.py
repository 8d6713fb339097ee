"""From the data node of a config to one dataset per split."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch.utils.data import IterableDataset

from trainkit.config.targets.build import build, resolve_target
from trainkit.config.targets.kinds import PLACES
from trainkit.data.hooks import class_node
from trainkit.data.reading.iterable import Stream
from trainkit.errors import ConfigError, DataError, Problem, TrainkitError
from trainkit.frames import named_first_line, with_frames
from trainkit.numerics.generators import Untouched, key32, name_id

__all__ = ["build_splits", "keep_splits", "size_of", "splits_of", "test_splits", "validation_splits"]

_KEPT: Final[dict[str, dict[str, Any]]] = {}
"""Data node -> its splits, if this process keeps them for jobs that are forked from it."""


def validation_splits(names: Iterable[str]) -> list[str]:
    """Return the splits that are evaluated during the training: `val`, and splits whose names begin with `val_`.

    Example:
        >>> validation_splits(["train", "val", "val_ood", "test", "valid"])
        ['val', 'val_ood']
    """
    return _named("val", names)


def test_splits(names: Iterable[str]) -> list[str]:
    """Return the splits that are evaluated once, at the end: `test`, and splits whose names begin with `test_`."""
    return _named("test", names)


def _named(kind: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == kind or name.startswith(f"{kind}_")]


def splits_of(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which splits a data node has, without building any.

    A class declares them by `splits`: a tuple of names, or a class method from the node's keys to one. Without it, a
    class that takes `split` has `train` and `val`, and any other class only `train`.

    Example:
        >>> splits_of({"_target_": "trainkit.data.sets.digits.Digits"})
        ('train', 'val')
    """
    target = resolve_target(node["_target_"], PLACES["data"])
    declared = getattr(target, "splits", None)
    if callable(declared):
        declared = declared({key: value for key, value in class_node(node).items() if key != "_target_"})
    if declared is not None:
        return tuple(declared)
    return ("train", "val") if _takes_split(target) else ("train",)


def build_splits(node: Mapping[str, Any]) -> dict[str, Any]:
    """Build the dataset of every split.

    Args:
        node: the `data` group: `_target_` and the class's own keys.

    Returns:
        Split name -> dataset; it always contains `train`.

    Raises:
        DataError: a split has no samples, or a dataset has no length.

    Example:
        >>> {name: len(part) for name, part in build_splits({"_target_": "trainkit.data.sets.digits.Digits"}).items()}
        {'train': 1437, 'val': 360}
    """
    node = class_node(node)
    if (kept := _KEPT.get(_name_of(node))) is not None:
        return dict(kept)
    names = splits_of(node)
    if "train" not in names:
        rule = f"has the splits {', '.join(names) or 'none'}, and training needs one that is called train."
        raise ConfigError([Problem(key="data._target_", value=node["_target_"], rule=rule)])
    own_nodes = getattr(resolve_target(node["_target_"], PLACES["data"]), "node_of", None)
    built = {}
    for split in names:
        part = node if own_nodes is None else own_nodes(node, split)
        takes_split = own_nodes is None and _takes_split(resolve_target(part["_target_"], PLACES["data"]))
        with Untouched(seed=key32(name_id(split))):  # random numbers in a constructor are the same on every rank
            built[split] = _by_position(_made(part, split, {"split": split} if takes_split else {}))
        if size_of(built[split]) == 0:
            raise DataError(f"the {split} split of {node['_target_']} is empty: it has no samples.")
    return built


def _by_position(dataset: Any) -> Any:
    """Return the dataset; one that can only be iterated, but has a length, is read as a stream."""
    iterated = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if iterated and hasattr(dataset, "__iter__") and hasattr(dataset, "__len__") and len(dataset):
        return Stream(source=dataset, num_samples=len(dataset))
    return dataset


def keep_splits(node: Mapping[str, Any]) -> bool:
    """Build the splits once for this process and its forks, which then share their memory; return
    whether they were kept.

    Only trainkit's own datasets of tensors in memory are kept: these contain no open file and no generator.

    Raises:
        DataError: as `build_splits`.
    """
    if not str(node.get("_target_")).startswith("trainkit."):
        return False
    node = class_node(node)
    built = build_splits(node)
    if not all(hasattr(part, "tensors") for part in built.values()):
        return False
    _KEPT[_name_of(node)] = built
    return True


def _name_of(node: Mapping[str, Any]) -> str:
    return json.dumps(node, sort_keys=True, default=str)


def size_of(dataset: Any) -> int:
    """Return the number of samples of a dataset.

    Raises:
        DataError: it has no length, or no random access.
    """
    name = type(dataset).__name__
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} has no length, so that no epoch can be planned. Give it __len__, or name it as the source of a "
            "stream with a number of samples: data=stream data.source._target_=... data.num_samples=N."
        )
    try:
        return len(dataset)
    except (TypeError, ValueError) as error:
        text = f"the length of {name} is no number of samples: {named_first_line(error)}."
        raise DataError(with_frames(text, error)) from error


def read_sample(dataset: Any, place: int) -> Any:
    """Return a sample of a dataset.

    Raises:
        DataError: the dataset raised an error of its own.
    """
    try:
        return dataset[place]
    except TrainkitError:
        raise
    except Exception as error:
        text = f"sample {place} of {type(dataset).__name__} cannot be read: {named_first_line(error)}."
        raise DataError(with_frames(text, error)) from error


def _made(node: Mapping[str, Any], split: str, given: Mapping[str, Any]) -> Any:
    """Build the dataset of a split.

    Raises:
        DataError: its constructor raised an error of its own.
    """
    try:
        return build(node, "data", **given)
    except TrainkitError:
        raise
    except Exception as error:
        text = f"the {split} split of {node['_target_']} cannot be made: {named_first_line(error)}."
        raise DataError(with_frames(text, error)) from error


def _takes_split(target: Any) -> bool:
    return "split" in inspect.signature(target).parameters
