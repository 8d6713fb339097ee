"""Models whose own code does what a list of calls must keep: fresh containers, modes of torch, objects between blocks.

All but the decoder take points of `zoo.FEATURES` numbers and give scores of `zoo.CLASSES` classes. Each has at least
two blocks with parameters, `first` and `second`, and its weights are made by formula. A pipeline refuses those of
`REFUSED`, whose forward passes leave something behind for other blocks or for the next pass.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.zoo import CLASSES, FEATURES, LENGTH, TOKENS, fill
from trainkit.strategies.base import StepOutcome
from trainkit.trainer.events import Callback, Run


class TwoLayers(nn.Module):
    """Two layers, joined by `between`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        scores: Tensor = self.second(self.between(self.first(inputs)))
        return scores

    def between(self, hidden: Tensor) -> Tensor:
        """What the model's own code does."""
        return torch.tanh(hidden)


class Pair(NamedTuple):
    """What a block returns at once."""

    hidden: Tensor
    scale: Tensor


class Containers(nn.Module):
    """Fresh containers of tensors and constants go in and out of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Splitting(), Joining()
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        pair = self.first({"x": inputs, "power": 2})
        losses = [pair.scale]
        losses.append(pair.hidden.abs().mean())
        scores: Tensor = self.second(pair.hidden, {"losses": losses, "names": ("a", None)})
        return scores


class Splitting(nn.Module):
    """A layer that takes a dict and returns a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 7)

    def forward(self, fields: dict[str, Any]) -> Pair:
        """What is given -> hidden numbers, and their size."""
        hidden = torch.tanh(self.layer(fields["x"]))
        return Pair(hidden, (hidden ** fields["power"]).mean())


class Joining(nn.Module):
    """A layer that takes a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, CLASSES)

    def forward(self, hidden: Tensor, more: dict[str, Any]) -> Tensor:
        """(samples, 7) -> (samples, classes)."""
        scores: Tensor = self.layer(hidden) * (1 + sum(more["losses"]))
        return scores


class WritingInPlace(TwoLayers):
    """Writes into what a block returned, through a view as well, and into a tensor that it uses again later."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        mine = inputs.clone()
        hidden = self.first(inputs)
        hidden[:, 0] += 1
        hidden.mul_(0.5).tanh_()
        mine += 1
        scores: Tensor = self.second(hidden)
        return scores + mine.mean()


class WithoutGradient(TwoLayers):
    """Runs its first block without gradients in one branch, and scales by numbers that none flows through."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        hidden = self.first(inputs)
        with torch.no_grad():
            size = hidden.square().mean() + 1
            again = self.first(inputs.flip(0))
        scores: Tensor = self.second(torch.tanh(hidden / size + again))
        return scores


class Backwards(torch.autograd.Function):
    """Turns gradients around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same numbers."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Minus the gradient."""
        return -0.5 * grad


class OwnFunction(TwoLayers):
    """The model's own code applies a function with a backward pass of its own."""

    def between(self, hidden: Tensor) -> Tensor:
        """Tanh with half of its gradient, turned around."""
        turned: Tensor = Backwards.apply(torch.tanh(hidden))  # type: ignore[no-untyped-call]
        return turned


class FullPrecision(TwoLayers):
    """The model's own code multiplies outside of autocast."""

    def between(self, hidden: Tensor) -> Tensor:
        """Products of the numbers as they are."""
        with torch.autocast(hidden.device.type, enabled=False):
            mixed = hidden.float() @ hidden.float().T
        return torch.tanh(mixed @ hidden.to(mixed.dtype))


class CountingBlock(nn.Module):
    """A layer that counts its own calls, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.sizes = nn.Linear(FEATURES, 7), 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        """(samples, features) -> (samples, 7)."""
        self.calls += 1
        self.sizes.append(len(x))
        scale = 1 + 0.01 * self.calls + 0.001 * len(self.sizes)
        return torch.tanh(self.layer(x) * scale)


class BlockThatCounts(TwoLayers):
    """Its first block keeps a count for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = CountingBlock()  # type: ignore[assignment]
        fill(self)


class Seeding(TwoLayers):
    """Seeds torch's generator itself."""

    def between(self, hidden: Tensor) -> Tensor:
        """The same noise in every pass."""
        torch.manual_seed(5)
        return torch.tanh(hidden + torch.randn(7))


class WritingIntoInputs(TwoLayers):
    """Writes into its inputs, and uses them again at the end."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        inputs.mul_(2)
        scores: Tensor = self.second(torch.tanh(self.first(inputs)))
        return scores + inputs.mean()


class Tempered(TwoLayers):
    """The model's own code divides by a temperature, which `Annealing` lowers."""

    temperature = 2.0

    def between(self, hidden: Tensor) -> Tensor:
        """Sharper and sharper."""
        return torch.tanh(hidden / self.temperature)


@dataclass(frozen=True, kw_only=True)
class Annealing(Callback):
    """Lowers the temperature of the model after every step."""

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """The model's own attribute, on every rank."""
        run.model.temperature = 2.0 / (1 + run.state.step)  # type: ignore[assignment]


EQUAL: Final[dict[str, type[nn.Module]]] = {
    kind.__name__: kind
    for kind in (
        Containers,
        WritingInPlace,
        WithoutGradient,
        OwnFunction,
        FullPrecision,
        BlockThatCounts,
        Seeding,
        WritingIntoInputs,
    )
}
"""Models that a pipeline trains as one device does, by name."""


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
        losses = notes.losses if isinstance(notes, Notes) else notes.values() if isinstance(notes, dict) else notes
        total: Tensor = scores * sum(losses)
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
        self.tensors: list[Tensor] = []

    def append(self, tensor: Tensor) -> None:
        """Keep one more."""
        self.tensors.append(tensor)

    def __iter__(self) -> Any:
        return iter(self.tensors)


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
        output: Tensor = hidden.losses[0]
        return output


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


class Decoder(nn.Module):
    """A decoder as transformers has them: embedding, layers and norm are parts of one child, and the head another."""

    def __init__(self, *, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.transformer = Trunk(layers, width)
        self.lm_head = nn.Linear(width, TOKENS, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        fill(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, length) int64 -> (samples, length, tokens)."""
        scores: Tensor = self.lm_head(self.transformer(tokens))
        return scores


class Trunk(nn.Module):
    """All but the head."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.ln_f = nn.LayerNorm(width)
        self.h = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, length) int64 -> (samples, length, width)."""
        hidden = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        for layer in self.h:
            hidden = layer(hidden, mask=mask)
        normed: Tensor = self.ln_f(hidden)
        return normed


class Layer(nn.Module):
    """Attention over earlier tokens, with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
        """(samples, length, width) -> the same."""
        query, value = self.query(hidden), self.value(hidden)
        return hidden + functional.scaled_dot_product_attention(query, hidden, value, attn_mask=mask)
