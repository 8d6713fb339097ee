"""From the data node of a config to one dataset per split, or to those of one fold.

Each fold of the training split is held out once, to validate the training on the others.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from trainkit.config.sections import CvConfig
from trainkit.config.targets.build import build, resolve_target
from trainkit.config.targets.kinds import PLACES
from trainkit.data.hooks import class_node
from trainkit.data.reading.iterable import Stream
from trainkit.data.stored import Stored, stored_of
from trainkit.errors import ConfigError, DataError, Problem, TrainkitError
from trainkit.frames import named_first_line, with_frames
from trainkit.numerics.batch import SampleOrder
from trainkit.numerics.generators import Untouched, hash64, key32, name_id

_KEPT: Final[dict[str, dict[str, Any]]] = {}
"""Data node -> its splits, cached in this process for the jobs that are forked from it."""


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

    A class declares them by `splits`: a tuple of names, or a class method that computes them from the node's keys.
    Without it, a class that takes `split` has `train` and `val`, and any other class only `train`.

    Example:
        >>> splits_of({"_target_": "trainkit.data.Digits"})
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
        >>> {name: len(part) for name, part in build_splits({"_target_": "trainkit.data.Digits"}).items()}
        {'train': 1437, 'val': 360}
    """
    node = class_node(node)
    if (kept := _KEPT.get(_name_of(node))) is not None:
        return dict(kept)
    names = splits_of(node)
    if "train" not in names:
        rule = f"has the splits {', '.join(names) or 'none'}, and training needs one that is called train."
        raise ConfigError([Problem(key="data._target_", value=node["_target_"], rule=rule)])
    return {split: build_split(node, split) for split in names}


def build_split(node: Mapping[str, Any], split: str) -> Any:
    """Build the dataset of one split; arguments and errors are those of `build_splits`."""
    node = class_node(node)
    if (kept := _KEPT.get(_name_of(node))) is not None:
        return kept[split]
    own_nodes = getattr(resolve_target(node["_target_"], PLACES["data"]), "node_of", None)
    part = node if own_nodes is None else own_nodes(node, split)
    takes_split = own_nodes is None and _takes_split(resolve_target(part["_target_"], PLACES["data"]))
    with Untouched(seed=key32(name_id(split))):  # random numbers in a constructor are the same on every rank
        built = _by_position(_made(part, split, {"split": split} if takes_split else {}))
    if size_of(built) == 0:
        more = "".join(f" {note}." for note in getattr(built, "notes", ()))
        raise DataError(f"the {split} split of {node['_target_']} is empty: it has no samples.{more}")
    return built


def _by_position(dataset: Any) -> Any:
    """Return the dataset; one that can only be iterated, but has a length, is read as a stream."""
    iterated = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if iterated and hasattr(dataset, "__iter__") and hasattr(dataset, "__len__") and len(dataset):
        return Stream(source=dataset, num_samples=len(dataset))
    return dataset


def keep_splits(node: Mapping[str, Any]) -> bool:
    """Build and cache the splits for this process and its forks, which share their memory; return whether they were
    cached.

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
        text = f"the length of {name} is not a number of samples: {named_first_line(error)}."
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


_DEALING: Final = 0x666F6C64
"""Separates the random order of the assignment to folds from the order of an epoch."""


def folded(splits: Mapping[str, Any], cv: CvConfig) -> Mapping[str, Any]:
    """Return the splits of one fold: `val` is this fold of the training split, `train` the rest of it.

    The dataset's own validation split is dropped: it is used neither for training nor for selection. A test split
    stays.

    Args:
        splits: split -> dataset.
        cv: number of folds and the fold; without a fold, the first.

    Raises:
        ConfigError: there are more folds than samples, or the dataset has no random access.

    Example:
        >>> from trainkit.data.sets.digits import Digits
        >>> parts = folded({"train": Digits(split="train")}, CvConfig(folds=5, fold=0))
        >>> {name: len(part) for name, part in parts.items()}
        {'train': 1149, 'val': 288}
    """
    if cv.folds is None:
        return splits
    train = splits["train"]
    _refuse(train, cv.folds)
    held_out = fold_of_each(size_of(train), cv.folds, seed=cv.seed, labels=labels_of(train)) == (cv.fold or 0)
    # A dataset that augments its training samples provides a view without augmentation.
    still = train.held_out() if hasattr(train, "held_out") else train
    rest = {name: dataset for name, dataset in splits.items() if name not in ("train", "val")}
    return {"train": _chosen(train, ~held_out), "val": _chosen(still, held_out), **rest}


def _refuse(train: Any, folds: int) -> None:
    name = type(train).__name__
    if isinstance(train, Stream) or not hasattr(train, "__getitem__"):
        rule = f"{name} is read sequentially: a fold needs samples by their index. Use a map-style dataset."
    elif folds > size_of(train):
        rule = f"more than the {size_of(train)} samples of train. Use {size_of(train)} or fewer."
    else:
        return
    raise ConfigError([Problem(key="cv.folds", value=folds, rule=rule)])


def fold_of_each(
    num_samples: int, folds: int, *, seed: int, labels: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return the fold of each sample: samples are assigned round-robin, class after class if there are classes.

    Folds differ by at most one in size, and by at most one in the number of samples of each class.

    Args:
        num_samples: number of samples.
        folds: number of folds.
        seed: seed of the assignment; not the run's, so that runs with other seeds have the same folds.
        labels: (num_samples,) the class of each sample.

    Returns:
        (num_samples,) int64, from 0 to folds - 1.

    Example:
        >>> fold_of_each(4, 2, seed=0, labels=np.array([0, 0, 1, 1])).reshape(2, 2).sum(1).tolist()
        [1, 1]
    """
    order = SampleOrder(num_samples=num_samples, seed=hash64(seed, _DEALING)).indices(0, 0, num_samples)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    found = np.empty(num_samples, dtype=np.int64)
    found[order] = np.arange(num_samples) % folds
    return found


def labels_of(dataset: Any) -> NDArray[np.int64] | None:
    """Return the class of every sample, if the dataset provides it without reading samples one by one.

    Source of the classes: `labels` or `targets`, as in datasets of torchvision, or an in-memory pair whose second
    element is a column of integers.

    Example:
        >>> from trainkit.data.sets.digits import Digits
        >>> np.bincount(labels_of(Digits(split="val"))).tolist()
        [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    """
    labels = getattr(dataset, "labels", None)
    labels = getattr(dataset, "targets", None) if labels is None else labels
    if labels is None and callable(getattr(dataset, "tensors", None)):
        arrays = dataset.tensors()
        labels = arrays.get("target") if isinstance(arrays, Mapping) else arrays[-1]
    if labels is None or callable(labels):
        return None
    found = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    fits = found.shape == (size_of(dataset),) and np.issubdtype(found.dtype, np.integer)
    return found.astype(np.int64) if fits else None


def _chosen(dataset: Any, chosen: NDArray[np.bool_]) -> Any:
    return part_of(dataset, np.flatnonzero(chosen))


def part_of(dataset: Any, indices: NDArray[np.int64]) -> Any:
    """Return the samples at (n,) int64 indices of a dataset with random access, with the same ways of reading."""
    if callable(getattr(dataset, "gather", None)):
        return _PartGathered(dataset, indices)
    if callable(getattr(dataset, "tensors", None)):
        return _SubsetInMemory(dataset, indices)
    return _Subset(dataset, indices)


class _Subset:
    """A subset, read sample by sample."""

    def __init__(self, dataset: Any, indices: NDArray[np.int64]) -> None:
        self._dataset = dataset
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._indices[index])]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each sample, if the dataset has them."""
        labels = labels_of(self._dataset)
        if labels is None:
            raise AttributeError("labels")
        return labels[self._indices]

    @property
    def ids(self) -> list[Any]:
        """The id of each sample, if the dataset has them."""
        ids = getattr(self._dataset, "ids", None)
        if ids is None:
            raise AttributeError("ids")
        return [ids[int(index)] for index in self._indices]

    def as_stored(self) -> Stored | None:
        """Return the samples of the subset in the stored form, if the dataset has one."""
        stored = stored_of(self._dataset)
        return None if stored is None else replace(stored, samples=part_of(stored.samples, self._indices))

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the dataset, such as `decode`, except attributes that read all of it."""
        if name.startswith("_") or name in ("tensors", "gather", "labels", "targets", "ids"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _SubsetInMemory(_Subset):
    """A subset of a dataset in memory, copied at the first access."""

    as_stored = _Subset.as_stored

    @cached_property
    def _arrays(self) -> Any:
        arrays, places = self._dataset.tensors(), torch.from_numpy(self._indices)
        if isinstance(arrays, Mapping):
            return {name: tensor.index_select(0, places) for name, tensor in arrays.items()}
        return tuple(tensor.index_select(0, places) for tensor in arrays)

    def tensors(self) -> Any:
        """Return all samples."""
        return self._arrays


class _PartGathered(_Subset):
    """A subset of a dataset that reads many samples at once."""

    as_stored = _Subset.as_stored

    def gather(self, indices: Tensor) -> Any:
        """Return the samples at the positions `indices` of this subset."""
        return self._dataset.gather(torch.from_numpy(self._indices)[indices])
