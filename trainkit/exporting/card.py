"""The model card of an exported model, `README.md`: the training that it comes from, and how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from trainkit.config.secrets import redacted
from trainkit.exporting.trained import TrainedModel
from trainkit.storage import num_bytes
from trainkit.trainer.manifest import FileRecord

_SHOWN: Final = ("model", "data", "objective", "optimizer", "schedule", "precision", "epochs", "steps")
"""Parts of the config that the card shows."""


def model_card(
    trained: TrainedModel, files: Mapping[str, FileRecord], *, loading: str, notes: Sequence[str] = ()
) -> str:
    """Return the model card as Markdown; `loading` is the section of the format, `notes` are sentences for it."""
    facts, cfg = trained.facts, trained.cfg
    rows = {
        "weights": f"the {trained.which} ones, of step {trained.step:,}",
        "recipe": cfg.recipe,
        "run": facts.get("run"),
        "command": _code(facts.get("command")),
        "fingerprint": _code(facts.get("fingerprint")),
        "seed": cfg.seed,
        "files": ", ".join(f"{name} ({num_bytes(record.num_bytes)})" for name, record in files.items()),
    }
    table = "".join(f"| {name} | {_cell(value)} |\n" for name, value in rows.items() if value is not None)
    return "\n".join(
        [
            f"# {cfg.name}\n",
            f"| | |\n|---|---|\n{table}",
            *_metrics(facts.get("metrics"), of=trained),
            f"## Loading\n\n{loading}",
            *(f"{note}\n" for note in notes),
            "## Training\n",
            f"```yaml\n{_shown(trained)}```\n",
        ]
    )


def _metrics(metrics: Any, *, of: TrainedModel) -> list[str]:
    if not isinstance(metrics, Mapping) or not metrics or of.which != "last":
        return []
    rows = "".join(f"| {_cell(name)} | {value:.6g} |\n" for name, value in metrics.items() if value is not None)
    return [f"## Metrics\n\n| at the end of the run | |\n|---|---|\n{rows}"]


def _shown(trained: TrainedModel) -> str:
    values = redacted(trained.cfg.to_dict())[0]
    batch = {name: values["batch"][name] for name in ("global_size", "micro_size")}
    shown = {**{name: values[name] for name in _SHOWN}, "batch": batch}
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def _code(text: Any) -> str | None:
    return None if text is None else f"`{text}`"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
