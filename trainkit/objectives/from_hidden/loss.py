"""The loss of one shard: a sum and its weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainkit.errors import TrainingError


@dataclass(slots=True)
class Loss:
    """The loss of one shard.

    Example:
        >>> import torch
        >>> Loss(loss_sum=torch.tensor(6.0), weight=3.0).weight
        3.0
    """

    loss_sum: Tensor
    """() float32 (float64 in fp64 runs): the sum over this shard's targets, with its graph."""
    weight: Tensor | float
    """The number or weight of the summands: samples, tokens or class weights. A float needs no device work; a tensor is
    ().
    """
    extra: Tensor | None = None
    """() auxiliary loss, already a mean over the shard; the trainer scales it by the shard's share of the weight."""
    outputs: Any = None
    """The model's predictions, for metrics only, which must not use the graph."""
    targets: Any = None
    """The targets of the predictions, aligned with `outputs`."""
    terms: Mapping[str, Tensor] | None = None
    """Parts of the loss to log, by the names in `Objective.term_names`: each () a sum over this shard's targets.

    Gradients come from `loss_sum` alone.
    """
    counted: Tensor | None = None
    """Which targets count in the sum and the weight, for metrics: bool, one for each; None: all of them."""
    class_dim: int = -1
    """The dim of `outputs` with the classes, if they are scores of classes."""

    @property
    def classes(self) -> Tensor:
        """The class of each target, for metrics: of probabilities, the most likely one."""
        found: Tensor = self.targets
        return found.argmax(self.class_dim) if found.is_floating_point() else found

    @classmethod
    def of_terms(
        cls,
        terms: Mapping[str, Tensor],
        weight: Tensor | float,
        *,
        factors: Mapping[str, float] | None = None,
        outputs: Any = None,
        targets: Any = None,
        counted: Tensor | None = None,
        class_dim: int = -1,
    ) -> Loss:
        """Return the loss that adds up several terms, each logged without its factor.

        Args:
            terms: name -> () the sum over this shard's targets, with its graph.
            weight: the number or weight of the targets; the same for all terms.
            factors: name -> factor of the term in the loss; 1 if not given.
            outputs: as in `Loss`.
            targets: as in `Loss`.
            counted: as in `Loss`.
            class_dim: as in `Loss`.

        Raises:
            TrainingError: a factor is given for an unknown term.

        Example:
            >>> import torch
            >>> terms = {"labels": torch.tensor(6.0), "norm": torch.tensor(10.0)}
            >>> float(Loss.of_terms(terms, 3.0, factors={"norm": 0.1}).loss_sum)
            7.0
        """
        if factors and not factors.keys() <= terms.keys():
            unknown = ", ".join(sorted(factors.keys() - terms.keys()))
            raise TrainingError(f"a factor is given for {unknown}, and the terms are {', '.join(terms)}.")
        total: Tensor | None = None
        for name, term in terms.items():
            factor = factors.get(name) if factors else None
            part = term if factor is None else term * factor
            total = part if total is None else total + part
        if total is None:
            raise TrainingError("a loss without terms was given.")
        return cls(total, weight, None, outputs, targets, terms, counted, class_dim)
