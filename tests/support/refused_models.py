"""Models whose forward passes leave something behind in Python objects, for other blocks or for the next pass.

All take points of `zoo.FEATURES` numbers and give scores of `zoo.CLASSES` classes. Each has at least two blocks with
parameters, `first` and `second`, and its weights are made by formula.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.support.object_models import TwoLayers
from tests.support.zoo import CLASSES, FEATURES, fill

__all__ = ["REFUSED"]


@dataclass
class Notes:
    """What blocks leave for others."""

    losses: list[Tensor] = field(default_factory=list)
    layer: int = 0


class Noting(nn.Module):
    """A layer that adds the size of its output to what it is given: notes, a list or a dict."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, notes: Any) -> Tensor:
        """(samples, inputs) -> (samples, outputs)."""
        outputs = torch.tanh(self.layer(x))
        size = outputs.square().mean()
        if isinstance(notes, Notes):
            notes.losses.append(size)
            notes.layer += 1
        elif isinstance(notes, dict):
            notes[len(notes)] = size
        else:
            notes.append(size)
        return outputs


class ObjectBetweenBlocks(nn.Module):
    """An object goes through both blocks, and the scores depend on what they have left in it."""

    make: Callable[[], Any] = Notes

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Noting(FEATURES, 7), Noting(7, CLASSES)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        notes = type(self).make()
        scores = self.second(self.first(inputs, notes), notes)
        found = notes.losses if isinstance(notes, Notes) else notes.values() if isinstance(notes, dict) else notes
        total: Tensor = scores * sum(found)
        return total


class ListBetweenBlocks(ObjectBetweenBlocks):
    """A list of auxiliary losses."""

    make = list


class DictBetweenBlocks(ObjectBetweenBlocks):
    """A dict that blocks write into."""

    make = dict


class Cache:
    """What a decoder keeps of earlier tokens."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def append(self, kept: Tensor) -> None:
        """Keep one more."""
        self.kept.append(kept)

    def __iter__(self) -> Any:
        return iter(self.kept)


@dataclass
class CacheConfig:
    """What a cache is asked for with."""

    use_cache: bool = True


class CacheBetweenBlocks(ObjectBetweenBlocks):
    """A cache that is made in every pass because the model's config asks for one."""

    make = Cache

    def __init__(self) -> None:
        super().__init__()
        self.config = CacheConfig()


class Measured(nn.Module):
    """A layer that returns notes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 7)

    def forward(self, x: Tensor) -> Notes:
        """(samples, features) -> notes of what it has computed."""
        return Notes([torch.tanh(self.layer(x))])


class ObjectReturned(TwoLayers):
    """A block returns an object in which its numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Measured()  # type: ignore[assignment]
        fill(self)

    def between(self, hidden: Any) -> Tensor:
        """The numbers in the object."""
        found: Tensor = hidden.losses[0]
        return found


class Counting(TwoLayers):
    """Counts its passes, and computes with the count."""

    calls = 0

    def between(self, hidden: Tensor) -> Tensor:
        """Each pass is louder."""
        self.calls += 1
        return torch.tanh(hidden * (1 + 0.1 * self.calls))


class CountingOutside(TwoLayers):
    """Counts its passes in an object that is no attribute of it."""

    passes = itertools.count(1)

    def between(self, hidden: Tensor) -> Tensor:
        """Each pass is louder."""
        return torch.tanh(hidden * (1 + 0.1 * next(type(self).passes)))


class Remembering(TwoLayers):
    """Keeps what it computed for its next pass."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def between(self, hidden: Tensor) -> Tensor:
        """Mixed with the mean of the pass before."""
        mixed = hidden if self.last is None else hidden + self.last
        self.last = hidden.detach().mean(0)
        return torch.tanh(mixed)


class Tossing(TwoLayers):
    """Leaves something out by Python's own random numbers."""

    def between(self, hidden: Tensor) -> Tensor:
        """Half of the passes, doubled."""
        return torch.tanh(hidden * 2) if random.random() < 0.5 else torch.tanh(hidden)


class OwnGenerator(TwoLayers):
    """Draws from a generator that its pass makes."""

    def between(self, hidden: Tensor) -> Tensor:
        """The same noise in every pass."""
        return torch.tanh(hidden + torch.randn(7, generator=torch.Generator().manual_seed(5)))


class Averaging(TwoLayers):
    """Keeps an average in a buffer of its own, which its own code writes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))

    def between(self, hidden: Tensor) -> Tensor:
        """Minus the average so far."""
        centred = torch.tanh(hidden - self.mean)
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return centred


class Leaving(nn.Module):
    """A layer that leaves the size of its output in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 7)
        self.size: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(samples, features) -> (samples, 7)."""
        outputs = torch.tanh(self.layer(x))
        self.size = outputs.square().mean()
        return outputs


class ReadingAttribute(TwoLayers):
    """The model's own code reads what a block has left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Leaving()  # type: ignore[assignment]
        fill(self)

    def between(self, hidden: Tensor) -> Tensor:
        """Scaled by the attribute."""
        size = self.first.size
        assert isinstance(size, Tensor)
        return hidden * (1 + size)


class Raising(nn.Module):
    """A layer that counts into a list which another module has, too."""

    def __init__(self, inputs: int, outputs: int, seen: list[int]) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(inputs, outputs), seen

    def forward(self, x: Tensor) -> Tensor:
        """Louder with each call of any of them."""
        self.seen.append(1)
        return torch.tanh(self.layer(x) * (1 + 0.1 * len(self.seen)))


class SharingAList(nn.Module):
    """Two blocks have one list."""

    def __init__(self) -> None:
        super().__init__()
        seen: list[int] = []
        self.first, self.second = Raising(FEATURES, 7, seen), Raising(7, CLASSES, seen)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        scores: Tensor = self.second(self.first(inputs))
        return scores


REFUSED: Final[dict[str, type[nn.Module]]] = {
    kind.__name__: kind
    for kind in (
        ObjectBetweenBlocks, ListBetweenBlocks, DictBetweenBlocks, CacheBetweenBlocks, ObjectReturned, Counting,
        CountingOutside, Remembering, Tossing, OwnGenerator, Averaging, ReadingAttribute, SharingAList,
    )
}  # fmt: skip
"""Models that a pipeline refuses before anything starts, by name."""
