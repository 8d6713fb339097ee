"""`trainkit ls --model OVERRIDES`: list the layers of the model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainkit.report.json_output import print_json
from trainkit.report.numbers import compact, count
from trainkit.report.tables import row_lines
from trainkit.verbs.support.call import Call

if TYPE_CHECKING:
    from trainkit.run.estimates.model_summary import Layer, ModelSummary


def list_layers(call: Call, *, as_json: bool) -> int:
    """Print the layers of the model of a command line; return the exit code.

    Raises:
        ConfigError: the config has problems.
    """
    composition = call.compose()
    from trainkit.run.estimates.model_summary import layer_rows, summary_of  # noqa: PLC0415 - imports torch
    from trainkit.run.planning.memory import meta_model  # noqa: PLC0415
    from trainkit.run.planning.plan import make_plan  # noqa: PLC0415

    plan = make_plan(composition.cfg)
    found = summary_of(plan, meta_model(plan))
    if as_json:
        totals = {"batch": found.batch, "parameters": found.parameters, "trained": found.trained, "flops": found.flops}
        print_json({"version": 1, **totals, "note": found.note, "layers": layer_rows(found)})
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(found))
    return 0


def _lines(found: ModelSummary) -> list[str]:
    header = ("layer", "class", "output", "parameters", "FLOPs")
    total = (
        ""
        if found.flops is None
        else f", {compact(found.flops)} FLOPs in a forward pass of {count(found.batch)} samples"
    )
    trained = "" if found.trained == found.parameters else f", {count(found.trained)} of them trained"
    return [
        *row_lines(header, [_cells(one) for one in found.layers]),
        f"{count(found.parameters)} parameters{trained}{total}",
        *([f"note: {found.note}"] if found.note else []),
    ]


def _cells(layer: Layer) -> tuple[str, ...]:
    shape = "" if layer.output is None else " x ".join(map(str, layer.output))
    calls = f" ({layer.calls} calls)" if layer.calls > 1 else ""
    return (
        f"{layer.name}{calls}",
        layer.kind,
        shape,
        count(layer.parameters),
        compact(layer.flops) if layer.flops else "0",
    )
