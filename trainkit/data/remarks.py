"""Remarks on the data of a run: those of its classes, and generators whose numbers are not keyed by sample."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from trainkit.data.hooks import DataHooks
from trainkit.data.reading.iterable import Stream

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
    given = [getattr(dataset, "notes", ()) for dataset in datasets]
    notes = [note for one in given if isinstance(one, tuple | list) for note in one if isinstance(note, str)]
    functions = [] if hooks is None else [one.function for one in (hooks.collate, hooks.transform) if one is not None]
    held = dict.fromkeys(name for root in (*datasets, *functions) for name in own_generators(root))
    rule = (
        "is a generator that no key seeds: where samples draw from it, every worker process and rank draws the same "
        "numbers from its own copy, and a resumed run draws others. Draw from torch, random or np.random directly"
    )
    return [*dict.fromkeys(notes), *(f"{name} {rule}" for name in held)]


def own_generators(root: Any) -> Iterator[str]:
    """Yield the names of generators that an object, or a global variable of its methods, holds, at any depth.

    Example:
        >>> from torch.utils.data import RandomSampler
        >>> list(own_generators(RandomSampler([1, 2], generator=torch.Generator())))
        ['RandomSampler.generator']
    """
    seen = {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}  # noqa: SLF001 - those that are keyed
    queue = deque([(getattr(root, "__name__", type(root).__name__), root)])
    while queue and len(seen) < _MOST_OBJECTS:
        name, value = queue.popleft()
        if id(value) in seen or value is None or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            yield name
        elif isinstance(value, dict):
            queue.extend((f"{name}[{key!r}]", item) for key, item in islice(value.items(), _MOST_ITEMS))
        elif isinstance(value, list | tuple | set | frozenset):
            queue.extend((f"{name}[{place}]", item) for place, item in enumerate(islice(value, _MOST_ITEMS)))
        elif isinstance(value, partial):
            queue.extend([(name, value.func), (name, value.args), (name, value.keywords)])
        elif isinstance(value, MethodType):
            queue.append((name, value.__self__))
        elif isinstance(value, FunctionType):
            queue.extend(_of_function(name, value))
        else:
            queue.extend((f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())
            for kind in type(value).__mro__:
                slots = [slot for slot in vars(kind) if isinstance(vars(kind)[slot], MemberDescriptorType)]
                queue.extend((f"{name}.{slot}", getattr(value, slot, None)) for slot in slots)
                methods = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
                for method in methods:
                    if method.__name__ != "__init__":  # what it draws is the same in every process
                        queue.extend(_of_function(method.__qualname__, method))


def _of_function(name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of a function, the variables that it closes over, and the generators among its globals."""
    yield from ((name, value) for value in (function.__defaults__, function.__kwdefaults__))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for variable, cell in cells:
        with suppress(ValueError):  # a variable that is not set yet
            yield f"{name}.{variable}", cell.cell_contents
    for variable in function.__code__.co_names:
        if isinstance(value := function.__globals__.get(variable), _GENERATORS):
            yield f"{function.__module__}.{variable}", value
