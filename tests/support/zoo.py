"""Models and datasets of the contract tests: small, and the same in every process without a seed.

Every initial weight and every input is a float32 number by formula, so that float64 holds it exactly.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.models import resnet
from trainkit.models.gpt import Gpt
from trainkit.objectives.base import Loss, Supervised
from trainkit.objectives.classification import Classification
from trainkit.objectives.fields import scores_of
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.objectives.linear_cross_entropy import OutputLayer, linear_cross_entropy

FEATURES, CLASSES, TOKENS, LENGTH, PAD = 6, 3, 11, 5, -100


def wave(*shape: int, phase: float) -> Tensor:
    """Numbers between -1 and 1 that look like no other phase's; float32."""
    count = int(torch.Size(shape).numel())
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * (1.7 + phase)).float().reshape(shape)


def fill(model: nn.Module) -> nn.Module:
    """Give a model its weights by formula; of one without data, nothing is computed."""
    with torch.no_grad():
        for number, parameter in enumerate(param for param in model.parameters() if not param.is_meta):
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
            parameter.copy_(wave(*parameter.shape, phase=0.1 * number) / fan_in**0.5)
    return model


class Net(nn.Sequential):
    """Two layers; with `norm` and `dropout` also what makes the cut into shards matter."""

    def __init__(self, *, width: int = 7, norm: bool = False, dropout: float = 0.0) -> None:
        middle: list[nn.Module] = [nn.BatchNorm1d(width)] if norm else []
        middle += [nn.Tanh()] + ([nn.Dropout(dropout)] if dropout else [])
        super().__init__(nn.Linear(FEATURES, width), *middle, nn.Linear(width, CLASSES))
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        scores: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return scores


class Scaled(Net):
    """Its code reads an attribute that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        return super().forward(inputs) * self.scale


class Stepped(Net):
    """Its own code counts the passes in training mode, in a buffer."""

    def __init__(self, *, width: int = 7, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__(width=width, norm=norm, dropout=dropout)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        if self.training:
            self.get_buffer("steps").add_(1)
        return super().forward(inputs)


class Hooked(Net):
    """A hook scales the gradient of the first weight, or that of a layer's output."""

    def __init__(self, *, of_layer: bool = False) -> None:
        super().__init__()
        if of_layer:
            self.get_submodule("2").register_full_backward_hook(lambda _layer, grads, _: (grads[0] / 2,))  # type: ignore[index]
        else:
            self.get_parameter("0.weight").register_hook(lambda grad: grad / 2)  # type: ignore[no-untyped-call]


class Modes(Net):
    """Built in evaluation mode, as `from_pretrained` of transformers does; or with a norm that never leaves it."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__(norm=True)
        self.frozen = frozen
        self.get_buffer("1.running_mean").fill_(0.5)
        if not frozen:
            self.eval()

    def train(self, mode: bool = True) -> Self:
        """Keep the batch statistics, if they are frozen."""
        super().train(mode)
        if self.frozen:
            self.get_submodule("1").eval()
        return self


class Attention(nn.Module):
    """One head over a short sequence: tied weights, and a key bias whose true gradient is zero."""

    def __init__(self, *, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        fill(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, length) int64 -> (samples, length, tokens)."""
        x = self.embed(tokens)
        mixed = functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        outputs: Tensor = self.head(x + mixed)
        return outputs


def small_gpt(**sizes: Any) -> nn.Module:
    """The repo's own, for the sentences: its output layer shares the weight of the embedding."""
    usual = {"vocab_size": TOKENS, "context": LENGTH, "num_layers": 3, "num_heads": 2, "width": 8, "bias": True}
    return fill(Gpt(**usual | sizes))


def even_gpt(**sizes: Any) -> nn.Module:
    """The same with two blocks, and a vocabulary that ranks cut evenly."""
    return small_gpt(**{"vocab_size": 12, "num_layers": 2} | sizes)


def small_resnet() -> nn.Module:
    """The repo's own with narrow stages: convolutions, batch statistics, shortcuts."""
    with mock.patch.object(resnet, "_WIDTHS", (4, 4, 8, 8)), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        return resnet.ResNet(depth=18, num_classes=CLASSES)


def channels_last() -> nn.Module:
    """A small convnet whose weights lie in memory with the channels last, one of one channel a group and one of 1 x 1;
    for the pictures."""
    layers = [nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 5, 3, groups=5), nn.Conv2d(5, 7, 1), nn.Tanh(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(7 * 4 * 4, CLASSES))
    return fill(model.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def transposed(*, width: int = 7) -> nn.Module:
    """Two layers whose weights are transposed tensors, (inputs, outputs) in memory; for the points."""
    return transpose(Net(width=width))


def transposed_tied() -> nn.Module:
    """Attention whose matrices are transposed tensors, one of them tied; for the sentences."""
    return transpose(Attention())


def transpose(model: nn.Module) -> nn.Module:
    """Lay the matrices of a model out by columns; their values stay."""
    for param in model.parameters():
        if param.dim() == 2:
            param.data = param.data.t().contiguous().t()
    return model


class InMemory:
    """Samples in memory, as every dataset here has them."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All of them."""
        return self.inputs, self.targets


class Pictures(InMemory):
    """19 images of 3 x 8 x 8 in three classes."""

    def __init__(self) -> None:
        self.inputs = wave(19, 3, 8, 8, phase=0.3)
        self.targets = torch.arange(19) * 5 % CLASSES


class Points(InMemory):
    """37 points in three classes, in memory; 11 more to evaluate on."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(self, split: str = "train") -> None:
        count, phase = (37, 0.0) if split == "train" else (11, 0.5)
        self.inputs = wave(count, FEATURES, phase=phase)
        self.targets = (torch.arange(count) * 5 + (self.inputs[:, 0] > 0)) % CLASSES


class PartlyLabelled(Points):
    """The points, of which one in `every` has a target: some shards have none; with 1, no point has one."""

    def __init__(self, split: str = "train", every: int = 3) -> None:
        super().__init__(split)
        self.targets = torch.where(torch.arange(len(self.targets)) % every == 1, self.targets, PAD)


class Masks(InMemory):
    """19 images of 3 x 3 x 3 with a class for each pixel, 0 to 9 of which count; all sizes are that of the classes."""

    def __init__(self, *, soft: bool = False) -> None:
        self.inputs = wave(19, 3, 3, 3, phase=0.3)
        self.targets = (torch.arange(19 * 9) * 5 % 7 % CLASSES).reshape(19, 3, 3)
        for row, mask in enumerate(self.targets):
            mask.flatten()[row % 10 :] = PAD
        if soft:
            self.targets = wave(19, CLASSES, 3, 3, phase=0.7).softmax(1)


class SeveralSizes:
    """Ten images of 3 channels in several sizes, with a class for each pixel; a collate must pad them."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(self, split: str = "train") -> None:
        self.phase = 0.1 if split == "train" else 0.6

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        height, width = 3 + index % 3, 4 + index % 2
        image = wave(3, height, width, phase=self.phase + index)
        return image, (image.argmax(0) + index % 2) % CLASSES


def pixels() -> nn.Module:
    """Scores of classes for each pixel."""
    return fill(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, CLASSES, 1)))


class RecordedPoints:
    """The same points one at a time; each training index that is read is written down, one file a process."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(self, *, folder: str, split: str = "train") -> None:
        self.points = Points(split)
        self.path = Path(folder) / f"read_{os.getpid()}" if split == "train" else None

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(f"{int(index)}\n")
        return self.points[index]


class PoisonedPoints:
    """The points one at a time, some of which are NaN: whenever they are read, or for the first read."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(
        self, *, bad: Sequence[int], once: str | None = None, each: bool = False, split: str = "train"
    ) -> None:
        self.points, self.bad = Points(split), frozenset(bad if split == "train" else ())
        self.once = None if once is None else Path(once)
        """A folder, with a file for each sample that is NaN for its first read; None: for all of them."""
        self.each = each
        """Whether every process reads the sample in one pass: it is NaN for the first read of each."""

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.points[index]
        return (inputs * torch.nan if self._is_bad(int(index)) else inputs), target

    def _is_bad(self, index: int) -> bool:
        if index not in self.bad or self.once is None:
            return index in self.bad
        try:
            (self.once / (f"bad_{index}_{os.getpid()}" if self.each else f"bad_{index}")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class NoisyPoints(RecordedPoints):
    """The points with noise, which is written down beside the index."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.points[index]
        noise = torch.rand(FEATURES)
        if self.path is not None:
            with self.path.with_name(f"noise_{os.getpid()}").open("a") as file:
                file.write(f"{int(index)} {float(noise[0]):.8f}\n")
        return inputs + noise, target


class Sentences(InMemory):
    """29 short sequences, each with a different number of tokens that count."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(self, split: str = "train") -> None:
        count = 29 if split == "train" else 7
        grid = torch.arange(count * (LENGTH + 1)).reshape(count, LENGTH + 1)
        tokens = (grid * grid + 3 * grid) % 101 % TOKENS
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
        for row in range(count):
            self.targets[row, 1 + row % LENGTH :] = PAD


class EvenSentences(Sentences):
    """The same, cut to 4 tokens, which two and four ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.targets = self.inputs[:, :4].contiguous(), self.targets[:, :4].contiguous()


class CountedTokens(Supervised):
    """An objective whose weight is known only once the targets have been counted."""

    by_position: ClassVar[bool] = True

    def weight_per_sample(self, sample: object) -> float | None:
        """Not known before."""
        del sample
        return None

    def planned_weight_per_sample(self, sample: object) -> float:
        """At most."""
        del sample
        return float(LENGTH)

    def score(self, outputs: Any, targets: Tensor) -> Loss:
        """Cross entropy over the tokens that count."""
        flat = targets.flatten()
        loss = functional.cross_entropy(scores_of(outputs).flatten(0, 1), flat, ignore_index=PAD, reduction="sum")
        return Loss(loss_sum=loss, weight=(flat != PAD).sum())


class HiddenTokens(LanguageModelling):
    """A language model's objective that computes its loss in the output layer, and nowhere else in training."""

    draws_nothing: ClassVar[bool] = True
    by_position: ClassVar[bool] = True

    def score(self, outputs: Any, targets: Tensor) -> Loss:
        """Refuse scores that a loss would be computed from."""
        assert not torch.is_grad_enabled()
        return super().score(outputs, targets)

    def loss_from_hidden(self, hidden: Tensor, output: OutputLayer, targets: Tensor) -> Loss:
        """Sum the loss of the language model in chunks, however few its scores are."""
        layer, tensors = output.layer, (hidden.flatten(0, 1), output.layer.weight, targets.flatten())
        loss = linear_cross_entropy(*tensors, bias=layer.bias, score=output.score, part=output.part, few=0)
        return Loss(loss_sum=loss, weight=(targets != PAD).sum())


def classes_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """Cross entropy over samples, for the oracle."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets, reduction="sum"), float(len(targets))


CLASS_WEIGHTS = [1.0, 2.0, 0.25]


def torch_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """The mean of torch with everything that it takes, times its divisor, which is counted here in Python."""
    inputs, targets = batch
    weights = torch.tensor(CLASS_WEIGHTS, dtype=inputs.dtype)
    if targets.is_floating_point():
        weight = float(targets[:, 0].numel())
    else:
        weight = sum(CLASS_WEIGHTS[label] for label in targets.flatten().tolist() if label != PAD)
    if not weight:
        return 0.0 * model(inputs).sum(), 0.0
    return functional.cross_entropy(model(inputs), targets, weight=weights, label_smoothing=0.1) * weight, weight


def tokens_sum(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """Cross entropy over the tokens that count, for the oracle."""
    inputs, targets = batch
    output = model(inputs)
    scores = getattr(output, "logits", output)  # transformers returns an object
    loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
    return loss, float((targets != PAD).sum())


@dataclass(frozen=True, kw_only=True)
class Odd(Classification):
    """Classification of points; with point `bad` in a shard either its loss or its gradient is not finite."""

    bad: int
    kind: Literal["loss", "gradient", "buffer"]

    def loss(self, model: Any, batch: Any) -> Loss:
        """As usual, and what `kind` says."""
        result = super().loss(model, batch)
        inputs, _ = batch
        if not model.training or not (inputs == Points().inputs[self.bad].to(inputs)).all(1).any():
            return result
        if self.kind == "buffer":
            next(model.buffers()).data.fill_(torch.inf)
            return result
        nothing = 0.0 * next(model.parameters()).sum()
        odd = torch.full_like(nothing, torch.inf).detach() if self.kind == "loss" else 0.0 * nothing.sqrt()
        return Loss(result.loss_sum + odd, result.weight, result.extra, result.outputs, result.targets)


class ChangesItself(Net):
    """The first layer is frozen; its own forward pass may change what is trained from the third call on."""

    def __init__(self, *, how: Literal["nothing", "unfreeze", "freeze"] = "nothing") -> None:
        super().__init__()
        self[0].requires_grad_(how == "freeze")
        self.how, self.calls = how, 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Count the calls in training, and change the first layer."""
        self.calls += self.training
        if self.calls > 2 and self.how != "nothing":
            self[0].requires_grad_(self.how == "unfreeze")
        return super().forward(inputs)


class Memory(nn.Module):
    """A recurrent cell whose state stays from step to step, with an entry for each column of the data."""

    sample_dims: ClassVar[dict[str, int | None]] = {"hidden": 1, "seen": 0}
    hidden: Tensor
    seen: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.cell = nn.Linear(FEATURES + 4, 4)
        self.register_buffer("hidden", torch.zeros(2, columns, 4))  # two copies, for a dim in front of the columns
        self.register_buffer("seen", torch.zeros(columns, dtype=torch.int64))

    def forward(self, inputs: Tensor, column: Tensor) -> Tensor:
        """Go on where the columns have stopped."""
        state = torch.tanh(self.cell(torch.cat([inputs, self.hidden[0, column].to(inputs)], 1)))
        if self.training:
            self.hidden[:, column] = state.detach().to(self.hidden)
            self.seen[column] += 1
        return state


class Reader(nn.Module):
    """A memory and a head."""

    def __init__(self, *, columns: int = 8, declares: bool = True) -> None:
        super().__init__()
        self.memory, self.head = Memory(columns), nn.Linear(4, CLASSES)
        if not declares:
            self.memory.sample_dims = {}  # type: ignore[misc]
        fill(self)

    def forward(self, inputs: Any, column: Tensor | None = None) -> Tensor:
        """Return scores; both arguments may be one, as in a pipeline."""
        inputs, column = inputs if column is None else (inputs, column)
        scores: Tensor = self.head(self.memory(inputs, column))
        return scores


class Columns(torch.utils.data.Dataset[dict[str, Any]]):
    """Pieces of columns: sample i is piece i // columns of column i % columns."""

    def __init__(self, split: str, *, columns: int = 8, count: int = 29) -> None:
        del split
        self.columns, self.inputs = columns, wave(count, FEATURES, phase=0.3)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, column = self.inputs[index], index % self.columns
        return {"input": inputs, "column": column, "both": (inputs, column), "target": index * index % CLASSES}


class Noisy(nn.Module):
    """Adds noise in evaluation too; or only draws it; or counts its calls."""

    def __init__(self, how: str = "adds", features: int = 64) -> None:
        super().__init__()
        self.how, self.calls, self.layer = how, 0, nn.Linear(features, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.randn(10) if self.how in ("adds", "draws") or self.training else torch.zeros(10)
        scores: Tensor = self.layer(inputs.flatten(1))
        if self.how == "adds":
            return scores + noise
        return scores + (float(self.calls) if self.how == "counts" else 0.0)
