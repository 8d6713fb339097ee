"""Samplers for `data.sampler`: they give each training sample the weight with which it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from trainkit.data.splits import labels_of
from trainkit.errors import DataError
from trainkit.fields import at_least


@dataclass(frozen=True, kw_only=True)
class BalancedClasses:
    """Draw every class equally often: the weight of a sample is one over the size of its class.

    The dataset provides the classes as `labels` or `targets`, as those of torchvision do, or by `tensors()`.

    Example:
        >>> class Three:
        ...     labels = np.array([0, 0, 1])
        ...     def __len__(self):
        ...         return 3
        >>> BalancedClasses()(Three())
        array([0.5, 0.5, 1. ])
    """

    power: Annotated[float, at_least(0)] = 1.0
    """1 balances the classes, 0 leaves them as they are; values between do it in part."""

    def __call__(self, dataset: Any) -> NDArray[np.float64]:
        """Return (samples,) float64."""
        labels = labels_of(dataset)
        if labels is None:
            raise DataError(
                f"data.sampler: BalancedClasses needs the class of each sample, and {type(dataset).__name__} has "
                "none. Give it an attribute labels, with an integer per sample."
            )
        _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
        weights: NDArray[np.float64] = counts.astype(np.float64)[inverse] ** -self.power
        return weights


@dataclass(frozen=True, kw_only=True)
class WeightsOf:
    """Draw by weights that the dataset has as an attribute, or as a method without arguments."""

    attribute: str = "sample_weights"
    """The name of the attribute; one number a sample."""

    def __call__(self, dataset: Any) -> Any:
        """Return (samples,) numbers."""
        weights = getattr(dataset, self.attribute, None)
        if weights is None:
            rule = f"{type(dataset).__name__} has no attribute {self.attribute}"
            raise DataError(f"data.sampler.attribute: {rule}. Add it, with a number per sample.")
        return weights() if callable(weights) else weights
