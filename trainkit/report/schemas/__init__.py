"""The JSON documents that trainkit writes: one dataclass or TypedDict each, from which `trainkit schema NAME` is made.

To add one, describe it in a class (a docstring under each field, a field `version`) and add a line to `DOCUMENTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

from trainkit.files import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One JSON document."""

    about: str
    """One line for the list of `trainkit schema`."""
    kind: str
    """The class that describes it, package.module.Name; imported when its schema is requested."""
    version: int = 1
    """Version, increased when a key is removed or changes its meaning; a new key does not increase it."""
    is_open: bool = False
    """Whether the document may hold further keys at its top, for example a file to which later versions add keys."""


DOCUMENTS: Final[Mapping[str, Document]] = {
    "error": Document(about="an error of a verb with --json", kind="trainkit.report.schemas.looking.ErrorDocument"),
    "explain": Document(about="trainkit explain KEY --json", kind="trainkit.report.schemas.looking.Explanation"),
    "plan": Document(about="trainkit plan --json", kind="trainkit.report.schemas.planning.Plan"),
    "ls": Document(about="trainkit ls --json", kind="trainkit.report.schemas.looking.Listing"),
    "model": Document(about="trainkit ls --model --json", kind="trainkit.run.estimates.model_summary.ModelSummary"),
    "top": Document(about="trainkit top DIR --json", kind="trainkit.report.schemas.looking.Ranking"),
    "replay": Document(about="trainkit replay RUN --json", kind="trainkit.report.schemas.looking.Replay"),
    "diff": Document(about="trainkit diff RUN RUN --json", kind="trainkit.report.schemas.looking.Comparison"),
    "compare": Document(
        about="trainkit compare A B --json, and a line of outputs/comparisons.jsonl",
        kind="trainkit.report.schemas.looking.PairedComparison",
    ),
    "comparisons": Document(about="trainkit compare --json", kind="trainkit.report.schemas.looking.Comparisons"),
    "capabilities": Document(about="trainkit capabilities --json", kind="trainkit.report.schemas.looking.Capabilities"),
    "bench": Document(about="trainkit bench --json, and bench.json", kind="trainkit.measuring.tables.BenchDocument"),
    "find_lr": Document(
        about="trainkit find lr --json, and find_lr.json", kind="trainkit.measuring.range_test.FindLrDocument"
    ),
    "find_micro_size": Document(
        about="trainkit find micro_size --json, and find_micro_size.json",
        kind="trainkit.measuring.searches.FindMicroSizeDocument",
    ),
    "scale": Document(
        about="trainkit scale --json, and scale.json", kind="trainkit.scaling.answers.ScaleDocument", version=2
    ),
    "advise": Document(about="trainkit advise --json", kind="trainkit.report.schemas.looking.AdviceDocument"),
    "prove_layouts": Document(about="trainkit prove --layouts N --json", kind="trainkit.prove.layouts.LayoutsDocument"),
    "prove_static": Document(about="trainkit prove --static --json", kind="trainkit.prove.static.StaticDocument"),
    "watch": Document(about="trainkit watch --json", kind="trainkit.watching.board.Watched"),
    "generate": Document(about="trainkit generate RUN --json", kind="trainkit.report.schemas.files.Generation"),
    "result": Document(about="RUN/result.json", kind="trainkit.report.schemas.files.Result", is_open=True),
    "status": Document(about="RUN/status.json", kind="trainkit.report.schemas.files.Status"),
    "stop_after": Document(about="RUN/stop_after.json", kind="trainkit.report.schemas.files.StopAfter"),
    "environment": Document(
        about="RUN/environment.json", kind="trainkit.report.schemas.files.Environment", is_open=True
    ),
    "settings": Document(about="RUN/settings.json", kind="trainkit.report.schemas.files.Settings"),
    "evaluation": Document(
        about="RUN/evaluations/NAME/evaluation.json", kind="trainkit.report.schemas.files.Evaluation"
    ),
    "run_plan": Document(about="RUN/plan.json", kind="trainkit.report.schemas.planning.RunPlan", is_open=True),
    "checkpoint_manifest": Document(
        about="RUN/checkpoints/STEP/manifest.json", kind="trainkit.report.schemas.checkpoints.Manifest"
    ),
    "checkpoint_index": Document(
        about="RUN/checkpoints/STEP/index.json", kind="trainkit.report.schemas.checkpoints.TensorIndex"
    ),
    "checkpoint_meta": Document(
        about="RUN/checkpoints/STEP/meta.json", kind="trainkit.report.schemas.checkpoints.Meta", is_open=True
    ),
    "checkpoints": Document(about="RUN/checkpoints/index.json", kind="trainkit.report.schemas.checkpoints.Names"),
    "evaluated": Document(about="RUN/checkpoints/evaluated.json", kind="trainkit.trainer.manifest.EvaluatedIndex"),
    "sweep": Document(about="SWEEP/sweep.json", kind="trainkit.report.schemas.files.Sweep", is_open=True),
    "state": Document(about="outputs/compare/SIDE/state.json", kind="trainkit.sweeps.results.states.State"),
    "tracking": Document(about="RUN/tracking/TRACKER.json", kind="trainkit.tracking.sending.TrackingState"),
    "prediction": Document(
        about="OUT.parts/prediction.json of trainkit predict", kind="trainkit.report.schemas.files.Prediction"
    ),
}
"""Name of a document -> its description."""


def kinds_of(document: type) -> dict[str, Kind]:
    """Return key -> types of its value, of a dataclass or TypedDict, for a reader that trusts no file.

    Example:
        >>> from trainkit.report.schemas.files import BegunBy
        >>> kinds_of(BegunBy)
        {'argv': (<class 'list'>,), 'notes': (<class 'list'>,)}
    """

    def kind(hint: Any) -> Any:
        if get_origin(hint) is Literal:
            return type(get_args(hint)[0])
        return dict if is_typeddict(hint) else get_origin(hint) or hint

    hints = get_type_hints(document).items()
    parts = {name: get_args(hint) if isinstance(hint, UnionType) else (hint,) for name, hint in hints}
    return {name: tuple(map(kind, hints)) for name, hints in parts.items()}
