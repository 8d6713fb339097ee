"""`trainkit evaluate RUN|FOLDER|FILE`: score a trained model on a split, each sample once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainkit.files import read_map
from trainkit.trainer.ownership import print_notice
from trainkit.verbs.running.train import template_of_job
from trainkit.verbs.support.call import Call

if TYPE_CHECKING:
    from trainkit.api.jobs import Evaluation, JobArguments

_MOST_ROWS: Final = 20
"""Largest number of rows and columns of a printed table."""


def run(call: Call) -> int:
    """Evaluate, write the results and print them."""
    with template_of_job(call):
        from trainkit.api.jobs import evaluate  # noqa: PLC0415 - imports torch

        result = evaluate(job_arguments(call))
    content = read_map(result.folder / "evaluation.json", {"version": int})
    call.show({**content, "folder": str(result.folder)}, _lines(result))
    return 0


def job_arguments(call: Call) -> JobArguments:
    """Return the model that a call of evaluate or predict names, and its split."""
    from trainkit.api.jobs import JobArguments  # noqa: PLC0415 - imports torch

    return JobArguments(
        path=Path(call.arguments[0]).expanduser(), overrides=call.overrides, split=call.flags.get("split"),
        checkpoint=call.flags.get("checkpoint", "last"), config_dirs=call.config_dirs, packages=call.packages,
        log=print_notice,
    )  # fmt: skip


def _lines(result: Evaluation) -> Iterator[str]:
    from trainkit.report.numbers import figure  # noqa: PLC0415 - not for --help
    from trainkit.report.tables import row_lines  # noqa: PLC0415 - the same

    content = result.content
    step = "" if content["step"] is None else f", step {content['step']:,}"
    yield f"{content['model']}, {content['checkpoint']}{step}: {content['num_samples']:,} samples of {content['split']}"
    width = max(map(len, content["metrics"]), default=0)
    yield from (f"  {name:<{width}}  {figure(value)}" for name, value in content["metrics"].items())
    for name, table in content["tables"].items():
        if max(len(table["rows"]), len(table["columns"]) - 1) > _MOST_ROWS:
            continue
        yield from ("", name, *row_lines(table["columns"], [[*map(_cell, row)] for row in table["rows"]]))
    yield from (f"note: {note}" for note in content["notes"])
    yield f"written: {result.folder}"


def _cell(cell: Any) -> str:
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:g}" if cell.is_integer() else f"{cell:.4g}"
