"""A confusion matrix as a figure, after each evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from trainkit.callbacks.figures.shown import EvaluationFigures, figure_path
from trainkit.errors import Problem
from trainkit.objectives.tables import MAX_CELLS, Table
from trainkit.report.drawing import confusion_request
from trainkit.trainer.events import Planned, Run

_log = logging.getLogger(__name__)

TABLE: Final = "confusion"
"""Name of the metric, as `Objective.details` gives it."""


@dataclass(frozen=True, kw_only=True)
class Confusion(EvaluationFigures):
    """Draws which classes are mistaken for which, after each evaluation: `plots/confusion_val.png`.

    Evaluations count the matrix besides the metrics of the objective, each sample once on any number of ranks. The page
    of the run and TensorBoard show it; `tables.jsonl` has the counts of every evaluation.
    """

    details: ClassVar[tuple[str, ...]] = (TABLE,)
    events_name: ClassVar[str] = "confusion"

    _has_said: bool = field(default=False, init=False, repr=False, compare=False)

    def validate(self, planned: Planned) -> list[Problem]:
        """Return problems: an objective without classes, and too many of them for a table."""
        dataset = planned.datasets["train"]
        tables = {*planned.objective.details(dataset, batch_size=1).metrics, *planned.objective.metrics()}
        if TABLE not in tables:
            rule = f"needs classes, and {type(planned.objective).__name__} has none. Leave it out."
            return [Problem(key=planned.key, rule=rule)]
        names = getattr(dataset, "classes", None)
        count = len(names) if isinstance(names, list | tuple) else 0
        if count**2 > MAX_CELLS:
            rule = (
                f"counts at most {MAX_CELLS:,} pairs of classes, and the dataset has {count:,} classes. Leave it out."
            )
            return [Problem(key=planned.key, rule=rule)]
        return []

    def eval_tables(self, run: Run, tables: Mapping[str, Table]) -> None:
        """Draw the matrix of each split."""
        if not run.is_owner:
            return
        found = {name: table for name, table in tables.items() if is_confusion(name, table)}
        if not found and not self._has_said:
            object.__setattr__(self, "_has_said", True)
            _log.warning("callbacks=[confusion] draws nothing: outputs are not (samples, classes), or have no targets.")
        for name, table in found.items():
            split = name.rpartition("/")[0]
            path = figure_path(run, TABLE, split)
            title = f"{run.cfg.name}: confusion matrix of {split}, step {run.state.step:,}"
            counts = [list(row[1:]) for row in table.rows]
            self._figures.ask(run, path, confusion_request(path, title=title, classes=table.columns[1:], counts=counts))


def is_confusion(name: str, table: Table) -> bool:
    """Return whether a table of an evaluation is a confusion matrix: of this name, and square.

    Example:
        >>> import torch
        >>> is_confusion("val/confusion", Table.of(torch.eye(2), ["cat", "dog"]))
        True
    """
    square = table.columns[1:] == tuple(str(row[0]) for row in table.rows)
    return name.rpartition("/")[2] == TABLE and bool(table.rows) and square
