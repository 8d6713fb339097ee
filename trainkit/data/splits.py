"""From the data node of a config to one dataset per split, to those of one fold, or to what their classes declare.

Each fold of the training split is held out once, to validate the training on the others.
"""

from __future__ import annotations

import gc
import inspect
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.utils.data import IterableDataset

from trainkit.config.sections import CvConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import build, resolve_target
from trainkit.config.targets.kinds import PLACES
from trainkit.data.declaration import Declared
from trainkit.data.hooks import DataHooks, class_node
from trainkit.data.reading.collate import with_parts
from trainkit.data.reading.iterable import Stream
from trainkit.data.stored import Stored, stored_of
from trainkit.errors import ConfigError, DataError, Problem, TrainkitError, named_first_line, with_frames
from trainkit.numerics.batch import SampleOrder
from trainkit.numerics.generators import Untouched, hash64, key32, name_id

_CACHED: Final[dict[str, dict[str, Any]]] = {}
"""Data node -> its splits, cached in this process for the jobs that are forked from it."""


def validation_splits(names: Iterable[str]) -> list[str]:
    """Return the splits that are evaluated during the training: `val`, and splits whose names begin with `val_`.

    Example:
        >>> validation_splits(["train", "val", "val_ood", "test", "valid"])
        ['val', 'val_ood']
    """
    return [name for name in names if name == "val" or name.startswith("val_")]


def test_splits(names: Iterable[str]) -> list[str]:
    """Return the splits that are evaluated once, at the end: `test`, and splits whose names begin with `test_`."""
    return [name for name in names if name == "test" or name.startswith("test_")]


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
    if (datasets := _CACHED.get(_name_of(node))) is not None:
        return dict(datasets)
    names = splits_of(node)
    if "train" not in names:
        rule = f"has the splits {', '.join(names) or 'none'}, and training needs one that is called train."
        raise ConfigError([Problem(key="data._target_", value=node["_target_"], rule=rule)])
    return {split: build_split(node, split) for split in names}


def build_split(node: Mapping[str, Any], split: str) -> Any:
    """Build the dataset of one split; arguments and errors are those of `build_splits`."""
    node = class_node(node)
    if (datasets := _CACHED.get(_name_of(node))) is not None:
        return datasets[split]
    own_nodes = getattr(resolve_target(node["_target_"], PLACES["data"]), "node_of", None)
    part = node if own_nodes is None else own_nodes(node, split)
    takes_split = own_nodes is None and _takes_split(resolve_target(part["_target_"], PLACES["data"]))
    kwargs = {"split": split} if takes_split else {}
    # random numbers in a constructor are the same on every rank
    with Untouched(seed=key32(name_id(split))), _named(f"the {split} split of {part['_target_']} cannot be made"):
        built = build(part, "data", **kwargs)
        iterated = isinstance(built, IterableDataset) or not hasattr(built, "__getitem__")
        if iterated and hasattr(built, "__iter__") and hasattr(built, "__len__") and len(built):
            built = Stream(source=built, num_samples=len(built))
    if size_of(built) == 0:
        notes = "".join(f" {note}." for note in getattr(built, "notes", ()))
        raise DataError(f"the {split} split of {node['_target_']} is empty: it has no samples.{notes}")
    return built


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
    _CACHED[_name_of(node)] = built
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
    with _named(f"the length of {name} is not a number of samples"):
        return len(dataset)


def read_sample(dataset: Any, index: int) -> Any:
    """Return a sample of a dataset.

    Raises:
        DataError: the dataset raised an error of its own.
    """
    with _named(f"sample {index} of {type(dataset).__name__} cannot be read"):
        return dataset[index]


@contextmanager
def _named(text: str) -> Iterator[None]:
    """Raise an error of the user's code as a DataError with its frames."""
    try:
        yield
    except TrainkitError:
        raise
    except Exception as error:
        raise DataError(with_frames(f"{text}: {named_first_line(error)}.", error)) from error


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
        >>> from trainkit.data.sets.images import Digits
        >>> parts = folded({"train": Digits(split="train")}, CvConfig(folds=5, fold=0))
        >>> {name: len(part) for name, part in parts.items()}
        {'train': 1149, 'val': 288}
    """
    if cv.folds is None:
        return splits
    train = splits["train"]
    if isinstance(train, Stream) or not hasattr(train, "__getitem__"):
        name = type(train).__name__
        rule = f"{name} is read sequentially: a fold needs samples by their index. Use a map-style dataset."
        raise ConfigError([Problem(key="cv.folds", value=cv.folds, rule=rule)])
    if cv.folds > size_of(train):
        rule = f"more than the {size_of(train)} samples of train. Use {size_of(train)} or fewer."
        raise ConfigError([Problem(key="cv.folds", value=cv.folds, rule=rule)])
    held_out = fold_of_each(size_of(train), cv.folds, seed=cv.seed, labels=labels_of(train)) == (cv.fold or 0)
    # A dataset that augments its training samples provides a view without augmentation.
    still = train.held_out() if hasattr(train, "held_out") else train
    rest = {name: dataset for name, dataset in splits.items() if name not in ("train", "val")}
    parts = {"train": Subset(train, np.flatnonzero(~held_out)), "val": Subset(still, np.flatnonzero(held_out))}
    return {**parts, **rest}


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
    assigned = np.empty(num_samples, dtype=np.int64)
    assigned[order] = np.arange(num_samples) % folds
    return assigned


def labels_of(dataset: Any) -> NDArray[np.int64] | None:
    """Return the class of every sample, if the dataset provides it without reading samples one by one.

    Source of the classes: `labels` or `targets`, as in datasets of torchvision, or an in-memory pair whose second
    element is a column of integers.

    Example:
        >>> from trainkit.data.sets.images import Digits
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
    classes = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    fits = classes.shape == (size_of(dataset),) and np.issubdtype(classes.dtype, np.integer)
    return classes.astype(np.int64) if fits else None


class Subset:
    """Some samples of a dataset; it has `gather` or `tensors` if the dataset has, and its other attributes."""

    def __init__(self, dataset: Any, indices: NDArray[np.int64]) -> None:
        self._dataset, self._indices = dataset, indices
        if callable(getattr(dataset, "gather", None)):
            self.gather = self._gathered
        elif callable(getattr(dataset, "tensors", None)):
            self.tensors = self._all

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._indices[index])]

    def as_stored(self) -> Stored | None:
        """Return the samples of the subset in the stored form, if the dataset has one."""
        stored = stored_of(self._dataset)
        return None if stored is None else replace(stored, samples=Subset(stored.samples, self._indices))

    def _gathered(self, indices: Tensor) -> Any:
        return self._dataset.gather(torch.from_numpy(self._indices)[indices])

    def _all(self) -> Any:
        return self._arrays

    @cached_property
    def _arrays(self) -> Any:
        """The samples of a dataset in memory, copied at the first access."""
        indices = torch.from_numpy(self._indices)
        return with_parts(self._dataset.tensors(), lambda tensor: tensor.index_select(0, indices))

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the dataset, such as `decode`, except attributes that read all of it.

        Classes and ids are those of its own samples.
        """
        if name.startswith("_") or name in ("tensors", "gather", "targets"):
            raise AttributeError(name)
        if name not in ("labels", "ids"):
            return getattr(self._dataset, name)
        of_all = labels_of(self._dataset) if name == "labels" else getattr(self._dataset, "ids", None)
        if of_all is None:
            raise AttributeError(name)
        return of_all[self._indices] if name == "labels" else [of_all[int(index)] for index in self._indices]


@dataclass(frozen=True)
class DeclaredLength:
    """A split with a length but without samples: they are unknown."""

    is_declared: ClassVar[bool] = True
    """Whether a user's function that reads the data must not be called with this split."""
    count: int
    declared: Declared

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of a sample as copied to the device; None: as in a made-up one."""
        return self.declared.stored_bytes


class DeclaredSplit(DeclaredLength):
    """A split of made-up samples; the same index always gives the same sample."""

    def __getitem__(self, index: int) -> Any:
        """Return a made-up sample."""
        assert self.declared.draw is not None
        return self.declared.draw(Generator().manual_seed(index))


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
        facts = "the steps of an epoch are" if ends else "the number of steps, and time and cost to the end, are"
        notes.append(
            f"data: {name} does not declare its length, and no data is opened: {facts} left out. --num-samples N gives "
            "it."
        )
    if train.draw is None:
        notes.append(
            f"data: {name} does not declare its samples, and no data is opened: activations, and the check that model "
            "and data fit, are left out. --open-data reads the data."
        )
    splits: dict[str, Any] = {}
    for split, declaration in declared.items():
        count = declaration.num_samples or (length if split == "train" else None) or unknown_length
        splits[split] = (DeclaredLength if declaration.draw is None else DeclaredSplit)(count, declaration)
    if cv.folds is not None and train.draw is not None:
        splits = dict(folded(splits, cv))
    elif cv.folds is not None:
        held_out = len(splits["train"]) // cv.folds
        counts = {"train": len(splits["train"]) - held_out, "val": held_out}
        splits |= {split: DeclaredLength(count, train) for split, count in counts.items()}
    return DeclaredData(splits=splits, knows_length=length is not None, notes=tuple(notes))


def _declared(node: Mapping[str, Any], split: str) -> Declared:
    """Return the declaration of the class of a node with the given keys."""
    target = resolve_target(node[TARGET], PLACES["data"])
    if (of_split := getattr(target, "node_of", None)) is not None:
        return _declared(of_split(node, split), split)
    declare = getattr(target, "declare", None)
    if declare is None:
        return Declared()
    keys = {key: value for key, value in node.items() if key != TARGET and value != "???"}
    declaration: Declared = declare(keys, split)
    return declaration


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
        names = [name for name in ("train", "val", "test") if node.get(name) is not None]
        return (*names, *(node.get("others") or {}))

    @classmethod
    def node_of(cls, node: Mapping[str, Any], split: str) -> Mapping[str, Any]:
        """Return the node of the dataset of a split."""
        part: Mapping[str, Any] = {**(node.get("others") or {}), **node}[split]
        return part

    def __len__(self) -> int:
        """Return the number of training samples."""
        return len(self.train)

    def __getitem__(self, index: int) -> Any:
        """Return a training sample."""
        return self.train[index]


_GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES: Final = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type, ModuleType)
_MOST_OBJECTS: Final = 20_000
_MOST_ITEMS: Final = 200


def remarks(datasets: Iterable[Any], hooks: DataHooks | None = None) -> list[str]:
    """Return the notes of datasets (their attribute `notes`), and a note about each generator that they hold.

    Args:
        datasets: the splits.
        hooks: the functions that `data` names in addition to its class.
    """
    datasets = [dataset for dataset in datasets if not isinstance(dataset, Stream)]  # read in one order by every rank
    candidates = [getattr(dataset, "notes", ()) for dataset in datasets]
    notes = [note for texts in candidates if isinstance(texts, tuple | list) for note in texts if isinstance(note, str)]
    hooked = [] if hooks is None else [hook.function for hook in (hooks.collate, hooks.transform) if hook is not None]
    holders = dict.fromkeys(text for root in (*datasets, *hooked) for text in unkeyed_generators(root))
    rule = (
        "that no key seeds: where samples draw from it, every worker process and rank draws the same numbers from its "
        "own copy, and a resumed run draws others. Draw from torch, random or np.random directly"
    )
    return [*dict.fromkeys(notes), *(f"{text} {rule}" for text in holders)]


def unkeyed_generators(root: Any) -> Iterator[str]:
    """Yield, as text, what holds each generator that an object, or the code of its class, refers to, at any depth.

    Example:
        >>> from torch.utils.data import RandomSampler
        >>> list(unkeyed_generators(RandomSampler([1, 2], generator=torch.Generator())))
        ['RandomSampler holds a torch._C.Generator']
    """
    seen = {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}  # noqa: SLF001 - those that are keyed
    queue = deque([root])
    while queue and len(seen) < _MOST_OBJECTS:
        value = queue.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            name, kind = getattr(root, "__name__", type(root).__name__), type(value)
            yield f"{name} holds a {kind.__module__}.{kind.__qualname__}"
        elif isinstance(value, FunctionType):
            named = (value.__globals__.get(variable) for variable in value.__code__.co_names)
            queue.extend(referent for referent in named if isinstance(referent, _GENERATORS))
            queue.extend([value.__defaults__, value.__kwdefaults__, value.__closure__])
        else:
            queue.extend(gc.get_referents(value)[:_MOST_ITEMS])
            methods = (item for kind in type(value).__mro__ for item in vars(kind).values())
            # what a constructor draws is the same in every process
            queue.extend(item for item in methods if isinstance(item, FunctionType) and item.__name__ != "__init__")
