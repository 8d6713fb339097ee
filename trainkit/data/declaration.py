"""Declaration of a split by its class, so that a run is planned without opening the data.

A class declares it by a class method `declare(keys, split)`, which returns `Declared`; it reads no file. Without it,
length and samples are unknown to the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Generator, Tensor


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Facts about a split that are known without its data.

    Example:
        >>> one = Declared(num_samples=3, draw=lambda generator: (torch.rand(4, generator=generator), 0))
        >>> one.draw(torch.Generator())[0].shape
        torch.Size([4])
    """

    num_samples: int | None = None
    """Length of the split; None if only the data knows it."""
    draw: Callable[[Generator], Any] | None = None
    """Function that returns a made-up sample with the right structure, shapes, dtypes and valid targets; None:
    unknown.
    """
    stored_bytes: int | None = None
    """Bytes of a sample as it is stored and copied to the device; None: as in the made-up sample."""


def with_defaults(cls: type, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of a node and, for those it lacks, the defaults of its dataclass.

    Example:
        >>> with_defaults(Declared, {"num_samples": 3})["num_samples"], with_defaults(Declared, {})["num_samples"]
        (3, None)
    """
    init_fields = [f for f in fields(cls) if f.init]
    values = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in init_fields}
    return {**values, **keys}


def image(generator: Generator, *shape: int) -> Tensor:
    """Return a random image or vector, `shape` float32."""
    return torch.rand(shape, generator=generator)


def label(generator: Generator, num_classes: int = 1) -> Tensor:
    """Return a random class, () int64."""
    return torch.randint(num_classes, (), generator=generator)


def window(generator: Generator, context: int, vocab_size: int | None) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets of a language model, (context,) int64 each."""
    tokens = torch.randint(vocab_size or 1, (context + 1,), generator=generator)
    return tokens[:-1], tokens[1:]
