"""Models whose own code does what a list of calls must keep: fresh containers, modes of torch, functions of its own.

All take points of `zoo.FEATURES` numbers and give scores of `zoo.CLASSES` classes. Each has at least two blocks with
parameters, `first` and `second`, and its weights are made by formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.zoo import CLASSES, FEATURES, fill
from trainkit.strategies.base import StepOutcome
from trainkit.trainer.events import Callback, Run

__all__ = ["EQUAL", "TwoLayers"]


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

    def forward(self, given: dict[str, Any]) -> Pair:
        """What is given -> hidden numbers, and their size."""
        hidden = torch.tanh(self.layer(given["x"]))
        return Pair(hidden, (hidden ** given["power"]).mean())


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
