"""Notes and problems of an objective under a plan, for its model and its data."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from trainkit.errors import Problem
from trainkit.objectives.base import Access
from trainkit.run.planning.plan import RunPlan


def objective_problems(plan: RunPlan, model: nn.Module) -> list[Problem]:
    """Return what is wrong with the objective of a plan: its terms, its model, and what compiling does not keep."""
    objective, compiled = plan.components.objective, plan.cfg.compile.mode
    found = [*_term_problems(plan), *objective.validate_model(model, plan.components.sample)]
    if compiled != "off" and Access.derivatives in objective.needs:
        named = f"{type(objective).__name__} {Access.derivatives.value}"
        rule = f"compiles one backward pass, and {named}, which takes a second. Use compile.mode=off."
        found.append(Problem(key="compile.mode", value=compiled, rule=rule))
    return found


def objective_notes(plan: RunPlan, model: nn.Module) -> list[str]:
    """Return the lines that the plan and the summary show of an objective."""
    return plan.components.objective.notes(model, plan.components.sample)


def _term_problems(plan: RunPlan) -> Iterator[Problem]:
    objective = plan.components.objective
    taken = {"loss", *objective.metrics()}
    for place, name in enumerate(objective.term_names):
        if name in taken or name in objective.term_names[:place]:
            rule = f"{type(objective).__name__} has the term {name!r} beside a loss, metric or term of that name. "
            rule += "Give each a name of its own."
            yield Problem(key="objective", rule=rule)
