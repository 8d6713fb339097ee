"""The terms of a loss, which are logged by their names in addition to the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.objectives.base import Loss, Objective


def add_terms(sums: dict[str, Tensor], objective: Objective, loss: Loss) -> None:
    """Add the terms of a shard's loss to sums by name, detached; nothing is read from the device.

    It runs for every shard, so it only makes a quick check; `terms_of` builds the error message.
    """
    names, terms = objective.term_names, loss.terms
    if terms is None:
        if names:
            terms_of(objective, loss)
        return
    if len(terms) != len(names):
        terms_of(objective, loss)
    for name in names:
        term = terms.get(name)
        if not isinstance(term, Tensor) or term.dim():
            term = terms_of(objective, loss)[name]
        seen = term.detach()
        sums[name] = sums[name] + seen if name in sums else seen


def terms_of(objective: Objective, loss: Loss) -> Mapping[str, Tensor]:
    """Return the terms of a shard's loss; empty if the objective names none.

    Raises:
        TrainingError: the terms are not those of `Objective.term_names`, or one is not a single number.
    """
    names, terms = objective.term_names, loss.terms or {}
    if terms.keys() != set(names):
        raise TrainingError(
            f"{type(objective).__name__} gives the terms {_listed(terms)}, and its term_names are {_listed(names)}: "
            "both must be the same in every shard."
        )
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.dim():
            found = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else f"a {type(term).__name__}"
            rule = "must be a tensor of one number: its sum over the shard"
            raise TrainingError(f"{type(objective).__name__}: the term {name} is {found}, and {rule}.")
    return terms


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
