"""A generator and a discriminator of small images, for generative adversarial training."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, unit


class Gan(nn.Module):
    """Two MLPs, called through one `forward`: `generator` makes images from noise, `discriminator` scores images.

    Example:
        >>> import torch
        >>> model = Gan(latent=4, channels=1, image_size=8, hidden=[16])
        >>> images = model(torch.zeros(2, 4), "generator")
        >>> images.shape, model(images, "discriminator").shape
        (torch.Size([2, 1, 8, 8]), torch.Size([2]))

    Source: Goodfellow et al. 2014, arXiv:1406.2661.
    """

    draws_nothing: ClassVar[bool] = True

    def __init__(
        self,
        *,
        latent: Annotated[int, at_least(1), unit("numbers")] = 16,
        channels: Annotated[int, at_least(1), unit("channels")] = 1,
        image_size: Annotated[int, at_least(1), unit("pixels")] = 8,
        hidden: Annotated[list[int], unit("units")],
    ) -> None:
        """Build both networks.

        Args:
            latent: dimension of the noise vector.
            channels: 1 for grey images, 3 for colour.
            image_size: pixels per side.
            hidden: widths of the hidden layers of the generator; the discriminator has them in reverse.
        """
        super().__init__()
        if not hidden or min(hidden) < 1:
            rule = "needs one width or more, each >= 1."
            raise ConfigError([Problem(key="model.hidden", value=hidden, rule=rule)])
        self._shape = (channels, image_size, image_size)
        size = channels * image_size**2
        self.generator = _mlp([latent, *hidden, size])
        self.discriminator = _mlp([size, *reversed(hidden), 1])

    def forward(self, inputs: Tensor, part: Literal["generator", "discriminator"]) -> Tensor:
        """Run one of the networks.

        Args:
            inputs: generator: (samples, latent) noise; discriminator: (samples, channels, image_size, image_size).
            part: the network.

        Returns:
            generator: images with pixels from 0 to 1; discriminator: (samples,) the logit that an image comes from the
                data.
        """
        if part == "generator":
            images: Tensor = self.generator(inputs).sigmoid().reshape(-1, *self._shape)
            return images
        scores: Tensor = self.discriminator(inputs.flatten(1))
        return scores.squeeze(1)


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])
