"""Generative adversarial training: a discriminator learns to recognise generated images, and a generator to deceive
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trainkit.fields import at_least, unit
from trainkit.objectives.base import Loss, Metric, Model, Objective
from trainkit.objectives.fields import input_of
from trainkit.objectives.metrics import Mean


@dataclass(frozen=True, kw_only=True)
class Adversarial(Objective):
    """The losses of a generative adversarial network, one per phase of a step; the generator has the non-saturating
    loss.

    The model is called as `model(noise, "generator")` and `model(images, "discriminator")`, which gives logits; its
    parameters are `generator.*` and `discriminator.*`. Evaluation reports the discriminator's loss, and the
    probabilities of being real that it gives to images of the data (`real`) and of the generator (`fake`).

    Example:
        >>> from trainkit.models.gan import Gan
        >>> model, images = Gan(latent=4, hidden=[8]), torch.zeros(3, 1, 8, 8)
        >>> Adversarial(latent=4).phase_loss("generator", model, images).weight
        3

    Source: Goodfellow et al. 2014, arXiv:1406.2661, section 3.
    """

    phases: ClassVar[tuple[str, ...]] = ("discriminator", "generator")

    latent: Annotated[int, at_least(1), unit("numbers")] = 16
    """Dimension of the noise vector: `latent` of the model."""

    def loss(self, model: Model, batch: Any) -> Loss:
        """Return the discriminator's loss."""
        images = _images(batch)
        with torch.no_grad():
            generated = model(self._noise(images), "generator")
        real, fake = model(images, "discriminator"), model(generated, "discriminator")
        return Loss(softplus(-real).sum() + softplus(fake).sum(), len(images), outputs=(real, fake))

    def phase_loss(self, phase: str, model: Model, batch: Any) -> Loss:
        """Return the loss of one of the networks."""
        if phase == "discriminator":
            return self.loss(model, batch)
        images = _images(batch)
        fake = model(model(self._noise(images), "generator"), "discriminator")
        return Loss(softplus(-fake).sum(), len(images))

    def _noise(self, images: Tensor) -> Tensor:
        return torch.randn(len(images), self.latent, device=images.device)

    def metrics(self) -> dict[str, Metric]:
        """Return the mean probability of being real, for both kinds of images."""

        def probability(index: int, loss: Loss) -> tuple[Tensor, float]:
            scores = loss.outputs[index]
            return scores.detach().double().sigmoid().sum(), len(scores)

        return {name: Mean(partial(probability, index)) for index, name in enumerate(("real", "fake"))}


def _images(batch: Any) -> Tensor:
    """Return the images of a batch, which may also have labels."""
    images: Tensor = input_of(batch)
    return images
