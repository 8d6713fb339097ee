"""Models and objectives that draw random numbers in code of their own, for the samples of the zoo."""

from __future__ import annotations

import os
import random
import time
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.zoo import CLASSES, FEATURES, PAD, Points, Sentences, fill
from trainkit.objectives.base import Loss, Model, Objective, Supervised


class FunctionalDropout(nn.Module):
    """Three layers; the model's own code drops activations after the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 7), nn.Linear(7, 7)
        self.last = nn.Linear(7, CLASSES)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        hidden = functional.dropout(self.first(inputs).tanh(), 0.5, self.training)
        hidden = functional.dropout(self.second(hidden).tanh(), 0.5, self.training)
        scores: Tensor = self.last(hidden)
        return scores


class Reparametrised(nn.Module):
    """A variational encoder and a decoder; the model's own code draws noise and latents, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 8), nn.Linear(4, CLASSES)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        mean, log_variance = self.encoder(inputs + 0.1 * torch.randn_like(inputs)).chunk(2, -1)
        scores: Tensor = self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        return scores


class _Residual(nn.Module):
    def __init__(self, *, host: bool) -> None:
        super().__init__()
        self.host = host
        self.inner = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.inner(hidden)
        if not self.training:
            return hidden + added
        mask = torch.rand(hidden.shape[0], 1, dtype=hidden.dtype, device=hidden.device) < 0.7
        if self.host:
            mask = mask & (random.random() < 0.7)
        return hidden + mask * functional.dropout(added, 0.1)


class DropPath(nn.Module):
    """Residual branches that are dropped sample by sample (stochastic depth), with dropout inside and after.

    With `host` the whole branch is dropped too, by Python's `random`.
    """

    def __init__(self, *, host: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 7)
        self.blocks = nn.ModuleList(_Residual(host=host) for _ in range(3))
        self.last = nn.Linear(7, CLASSES)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.last(hidden)
        return scores


class Slow:
    """Points or sentences, with noise on inputs that are floats; reading takes a random time."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    def __init__(self, *, of: str = "points", split: str = "train") -> None:
        kinds: dict[str, type[Points | Sentences]] = {"points": Points, "sentences": Sentences}
        self.samples = kinds[of](split)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(int.from_bytes(os.urandom(1), "little") * 4e-6)
        inputs, target = self.samples[index]
        return (inputs + 0.1 * torch.rand(inputs.shape) if inputs.is_floating_point() else inputs), target


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(FEATURES, 7), nn.Dropout(0.3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.first(inputs))
        for layer in self.layers:
            hidden = functional.dropout(layer(hidden), 0.2, self.training)
        return hidden


class DrawingBody(nn.Module):
    """A body that draws in its own code around its layers, and a head; the body is one child, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _Body(), nn.Linear(7, CLASSES)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        scores: Tensor = self.head(self.body(inputs))
        return scores


class Diffusion(Objective):
    """The model finds the noise in its inputs; the objective draws the noise, and after the model a weight a sample."""

    def loss(self, model: Model, batch: Any) -> Loss:
        """Squared error of the noise's first features."""
        inputs, _ = batch
        noise = torch.randn_like(inputs)
        outputs = model(0.8 * inputs + 0.6 * noise)
        errors = (outputs - noise[:, :CLASSES]).square().sum(-1)
        return Loss((errors * torch.rand_like(errors)).sum(), float(len(errors)))


class MaskedWords(Objective):
    """The objective hides words, and those hidden are to be found; how many there are is counted."""

    def weight_per_sample(self, sample: object) -> float | None:
        """Not known before."""
        del sample
        return None

    def loss(self, model: Model, batch: Any) -> Loss:
        """Cross entropy over the words that were hidden."""
        tokens, _ = batch
        hidden = torch.rand(tokens.shape, device=tokens.device) < 0.4
        targets = tokens.masked_fill(~hidden, PAD).flatten()
        scores = model(tokens.masked_fill(hidden, 0)).flatten(0, 1)
        return Loss(functional.cross_entropy(scores, targets, ignore_index=PAD, reduction="sum"), hidden.sum())


class TwoViews(Objective):
    """The model is run twice on one batch and its outputs are held to each other, as in R-Drop."""

    def loss(self, model: Model, batch: Any) -> Loss:
        """Squared difference of the two, and cross entropy of the first."""
        inputs, targets = batch
        first, second = model(inputs), model(inputs)
        apart = (first - second).square().sum()
        return Loss(apart + functional.cross_entropy(first, targets, reduction="sum"), float(len(targets)))


class Mixup(Objective):
    """Pairs of samples are mixed by a share that NumPy draws."""

    def loss(self, model: Model, batch: Any) -> Loss:
        """Cross entropy against both targets."""
        inputs, targets = batch
        share, shift = np.random.beta(0.4, 0.4), random.randrange(len(targets))  # noqa: NPY002 - what users write
        scores = model(share * inputs + (1 - share) * inputs.roll(shift, 0))
        losses = [functional.cross_entropy(scores, y, reduction="sum") for y in (targets, targets.roll(shift, 0))]
        return Loss(share * losses[0] + (1 - share) * losses[1], float(len(targets)))


class NoisyScores(Supervised):
    """Noise is added to the scores, which a pipeline's last stage does too."""

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        """Cross entropy of what is left."""
        noisy = outputs + 0.5 * torch.randn_like(outputs)
        return Loss(functional.cross_entropy(noisy, targets, reduction="sum"), float(len(targets)))
