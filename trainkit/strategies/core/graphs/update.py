"""Clipping and the update of the optimizer, as a function that torch.compile traces whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.numerics.copies import sent_to
from trainkit.strategies.base import UpdateParams
from trainkit.strategies.core.graphs.formulas import Formula, formula_of
from trainkit.strategies.core.optimizer import OptimizerStepper, joined_counts
from trainkit.strategies.core.replica import Replica

FIRST: int = 3
"""Elements of a step's values before those of the formulas: start gradient, divisor of the loss, largest norm."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A parameter that the optimizer updates."""

    place: int
    """Index among the trained parameters."""
    formula: Formula
    first: int
    """Index of its formula's first value among the values of a step."""


@dataclass(kw_only=True)
class _Class:
    """Parameters of one group with equally many updates, which share the values of a step."""

    formula: Formula
    base_lr: float
    count: int

    def advance(self) -> None:
        """Count an update."""
        self.count += 1


class OptimizerTensors(NamedTuple):
    """The tensors of an optimizer that an update reads and writes, as inputs of a graph."""

    slots: list[list[Tensor]]
    """The slots of each member."""
    counts: list[Tensor]
    """The counts of updates that lie on the device of the parameters."""


class Updates:
    """Clips gradients and updates the parameters, their slots and their rounded copies, in place.

    The slots must exist: the first step of an optimizer creates them.

    Args:
        replica: provides the parameters.
        stepper: provides the optimizer; every group has a formula.
        used: for each parameter, whether it gets a gradient.
    """

    def __init__(self, replica: Replica, stepper: OptimizerStepper, used: Sequence[bool]) -> None:
        self._replica, self._stepper = replica, stepper
        self._masters, self._params = list(replica.masters.values()), replica.trained
        self._apart = replica.masters_apart
        self.members: list[Member] = []
        self.bind(used)

    def bind(self, used: Sequence[bool]) -> None:
        """Find the slots and the counts of the optimizer, which a restored checkpoint replaces."""
        stepper = self._stepper
        stepper.forget_kernels()
        states = stepper.optimizer.state
        place = {id(master): number for number, master in enumerate(self._masters)}
        self._classes: list[_Class] = []
        members: list[Member] = []
        found: dict[tuple[int, int], int] = {}
        for number, group in enumerate(stepper.optimizer.param_groups):
            formula = formula_of(type(stepper.optimizer), group)
            assert formula is not None
            for param in group["params"]:
                if not used[place[id(param)]]:
                    continue
                count = int(states[param]["step"]) if "step" in states[param] else 0
                if (number, count) not in found:
                    found[number, count] = FIRST + sum(one.formula.num_values for one in self._classes)
                    self._classes.append(_Class(formula=formula, base_lr=stepper.base_lrs[number], count=count))
                members.append(Member(place=place[id(param)], formula=formula, first=found[number, count]))
        members.sort(key=lambda one: one.place)
        self.members = members
        updated = [self._masters[one.place] for one in self.members]
        slots = [[states[p][slot] for slot in m.formula.slots] for p, m in zip(updated, self.members, strict=True)]
        counts = joined_counts([states[param] for param in updated if "step" in states[param]])
        here = self._replica.device
        self.tensors = OptimizerTensors(slots, [one for one in counts if one.device == here])
        """Inputs of a graph, because a restored checkpoint replaces them."""
        self._counts_elsewhere = [one for one in counts if one.device != here]
        self._updated = updated

    def values(self, seed: float, divisor: float, update: UpdateParams) -> Tensor:
        """Return the numbers of the next update that differ between steps, in the masters' dtype, on the device."""
        self._stepper.refuse_changes()
        numbers = [seed, divisor, 0.0 if update.max_norm is None else update.max_norm]
        for one in self._classes:
            numbers += one.formula.values(one.base_lr * update.lr_factor, one.count + 1)
        replica = self._replica
        return sent_to(replica.device, torch.tensor(numbers, dtype=replica.precision.master_dtype))

    def apply(
        self, grads: Sequence[Tensor | None], values: Tensor, tensors: OptimizerTensors, *, clips: bool
    ) -> Tensor | None:
        """Update everything from mean gradients; return the global norm before clipping, if they are clipped. Traced.

        Args:
            grads: mean gradients, one per parameter.
            values: the result of `values`.
            tensors: `self.tensors`.
            clips: whether gradients are scaled down to the largest norm.
        """
        each, norm = values.unbind(), None
        if clips:
            present = [grad for grad in grads if grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in present]))
            factor = torch.clamp(each[2] / (norm + 1e-6), max=1.0)
            grads = [None if grad is None else grad * factor for grad in grads]
        for member, own in zip(self.members, tensors.slots, strict=True):
            grad, master = grads[member.place], self._masters[member.place]
            if grad is None:
                continue
            member.formula.apply(master, grad, own, each[member.first : member.first + member.formula.num_values])
            if self._apart:
                self._params[member.place].copy_(master)
        for count in tensors.counts:
            count.add_(1)
        return norm

    def count(self) -> None:
        """Record that the update was made: advance the counts, and bring averages of the parameters up to date."""
        for one in self._classes:
            one.advance()
        for count in self._counts_elsewhere:
            count.add_(1)
        self._stepper.after_update(self._updated)
