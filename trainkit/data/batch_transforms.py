"""Transforms of whole batches for `data.batch_transform`: mixup, cutmix, and crops with flips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainkit.errors import DataError
from trainkit.fields import above, at_least, unit, within
from trainkit.numerics.copies import sent_to
from trainkit.objectives.fields import Field, chosen_fields, named_fields, with_fields


@dataclass(frozen=True, kw_only=True)
class _Mix:
    """The common part of the transforms that mix samples of a shard."""

    num_classes: Annotated[int, at_least(2), unit("classes")]
    """Number of classes."""
    alpha: Annotated[float, above(0)] = 1.0
    """Parameter of the Beta distribution: small values mix little."""
    share: Annotated[float, within(0, 1), unit("a share, 0 to 1")] = 1.0
    """Share of the shards that are mixed."""
    input: Field | None = None
    """The field that is mixed; null: as for `objective.input`."""
    target: Field | None = None
    """The field with the classes; null: as for `objective.target`."""

    def __call__(self, batch: Any) -> Any:
        """Return the mixed batch; the given one stays as it is.

        Random numbers are drawn on the host, so that they are the same for every device.
        """
        names, named = chosen_fields(batch, self.input, self.target), named_fields(batch)
        inputs, targets = named[names[0]], named[names[1]]
        if not targets.is_floating_point():
            try:
                targets = functional.one_hot(targets.long(), self.num_classes).movedim(-1, 1).to(inputs.dtype)
            except RuntimeError as error:
                name, last = type(self).__name__, self.num_classes - 1
                raise DataError(
                    f"{name} mixes the classes 0 to {last}, and a target is none of them: it is one that "
                    "objective.ignore_index leaves out, or data.batch_transform.num_classes is too small."
                ) from error
        mixes = np.random.random_sample() < self.share  # noqa: NPY002 - keyed by step and shard
        drawn = np.random.beta(self.alpha, self.alpha)  # noqa: NPY002
        order = sent_to(inputs.device, torch.randperm(len(inputs)))
        mixed, weight = self._mixed(inputs, inputs[order], targets, float(drawn) if mixes else 1.0)
        return with_fields(batch, {names[0]: mixed, names[1]: targets * weight + targets[order] * (1 - weight)})

    def _mixed(self, inputs: Tensor, others: Tensor, classes: Tensor, weight: float) -> tuple[Tensor, float]:
        """Return the mixed inputs, and the weight of a sample itself in them.

        Args:
            inputs: (samples, ...).
            others: the partner of each sample, of the same shape.
            classes: (samples, classes) probabilities, (samples, classes, ...) for masks.
            weight: the weight that was drawn.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MixUp(_Mix):
    """Mix each input and its class with those of another sample of the shard, with weights m and 1 - m.

    m is drawn from Beta(alpha, alpha), once per shard. Targets become probabilities of classes, (samples, classes), or
    (samples, classes, height, width) for masks.

    Example:
        >>> inputs, targets = MixUp(num_classes=3)((torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
        >>> targets.shape, targets.sum(dim=1).round().tolist()
        (torch.Size([4, 3]), [1.0, 1.0, 1.0, 1.0])

    Source: Zhang et al. 2018, arXiv:1710.09412.
    """

    alpha: Annotated[float, above(0)] = 0.2
    """Parameter of the Beta distribution: small values mix little."""

    def _mixed(self, inputs: Tensor, others: Tensor, classes: Tensor, weight: float) -> tuple[Tensor, float]:
        del classes
        return inputs * weight + others * (1 - weight), weight


@dataclass(frozen=True, kw_only=True)
class CutMix(_Mix):
    """Replace a rectangle of each image by that of another sample of the shard, and mix the classes by area.

    The area is drawn from Beta(alpha, alpha), once per shard, like its position. An image is (..., height, width).

    Example:
        >>> images, targets = CutMix(num_classes=2)((torch.ones(4, 1, 8, 8), torch.tensor([0, 1, 1, 0])))
        >>> images.shape, targets.shape
        (torch.Size([4, 1, 8, 8]), torch.Size([4, 2]))

    Source: Yun et al. 2019, arXiv:1905.04899.
    """

    def _mixed(self, inputs: Tensor, others: Tensor, classes: Tensor, weight: float) -> tuple[Tensor, float]:
        if inputs.dim() < 3:
            raise DataError(f"CutMix cuts images (samples, ..., height, width), not {tuple(inputs.shape)}.")
        if classes.dim() > 2:
            raise DataError(
                f"CutMix mixes one class of each image, and the targets are masks, {tuple(classes.shape)} as "
                "probabilities. MixUp mixes the classes of each pixel."
            )
        height, width = inputs.shape[-2:]
        side = (1 - weight) ** 0.5
        rows, columns = _interval(height, side), _interval(width, side)
        mixed = inputs.clone()
        mixed[..., rows, columns] = others[..., rows, columns]
        return mixed, 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)


@dataclass(frozen=True, kw_only=True)
class CropAndFlip:
    """Shift each image by up to `padding` pixels, fill with zeros, and mirror some of the images.

    Each image of a shard has its own shift. An image is (..., height, width).

    Example:
        >>> images, _ = CropAndFlip()((torch.ones(4, 3, 8, 8), torch.tensor([0, 1, 1, 0])))
        >>> images.shape
        torch.Size([4, 3, 8, 8])

    Source: He et al. 2015, arXiv:1512.03385, section 4.2.
    """

    padding: Annotated[int, at_least(0)] = 4
    """Most pixels of a shift, in each direction."""
    flip: Annotated[float, within(0, 1)] = 0.5
    """Share of the images that are mirrored left to right."""
    input: Field | None = None
    """The field with the images; null: as for `objective.input`."""

    def __call__(self, batch: Any) -> Any:
        """Return the transformed batch; the given one stays as it is."""
        name = chosen_fields(batch, self.input, None)[0]
        images: Tensor = named_fields(batch)[name]
        if images.dim() < 3:
            raise DataError(f"CropAndFlip crops images (samples, ..., height, width), not {tuple(images.shape)}.")
        flat, device = images.flatten(1, -3) if images.dim() > 3 else images.unsqueeze(1), images.device
        padded = functional.pad(flat, [self.padding] * 4)
        rows, columns = (self._starts(len(images)) + torch.arange(size) for size in images.shape[-2:])
        mirrored = torch.from_numpy(np.random.random_sample((len(images), 1)) < self.flip)  # noqa: NPY002 - keyed
        columns = torch.where(mirrored, columns.flip(1), columns)
        rows, columns = sent_to(device, torch.cat([rows, columns], dim=1)).split_with_sizes(images.shape[-2:], dim=1)
        samples, channels = torch.arange(len(images), device=device), torch.arange(flat.shape[1], device=device)
        index = (samples[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None])
        return with_fields(batch, {name: padded[index].view_as(images)})

    def _starts(self, count: int) -> Tensor:
        """Return (count, 1) first rows or columns within the padded images; drawn on the host, keyed."""
        return torch.from_numpy(np.random.randint(2 * self.padding + 1, size=(count, 1)))  # noqa: NPY002


def _interval(length: int, share: float) -> slice:
    """Return a random interval that covers a share of a length, cut off at the borders."""
    middle, half = int(np.random.randint(length)), int(length * share) // 2  # noqa: NPY002
    return slice(max(middle - half, 0), min(middle + half, length))
