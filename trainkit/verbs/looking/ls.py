"""`trainkit ls [GROUP [CHOICE] | RUNS]`: list the choices and the keys of each, or the runs of a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainkit.config.grammar import refusal
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.choices import read_choice
from trainkit.config.values import nearest
from trainkit.config.yaml_files import Document, read_document, shipped_conf, shipped_recipes, shown_text
from trainkit.errors import ConfigError, yaml_text
from trainkit.report.numbers import compact, count
from trainkit.report.tables import row_lines
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import read_status
from trainkit.verbs.support.call import Call
from trainkit.watching.board import runs_below

if TYPE_CHECKING:
    from trainkit.run.estimates.model_summary import Layer, ModelSummary


def run(call: Call) -> int:
    """Print groups, the choices of a group, a choice, the runs below a folder, or the layers of a model.

    Only the last imports torch.
    """
    if "model" in call.flags:
        call.check_arity()
        return _list_layers(call)
    call.check_arity(0, 2, overrides=False)
    groups = _groups(call)
    if not call.arguments:
        rows = [(group, ", ".join(choices)) for group, choices in groups.items()]
        call.show(_listing(groups), [*_table(rows), *_HINT])
        return 0
    group = call.arguments[0]
    if group not in groups and len(call.arguments) == 1 and (folder := Path(group).expanduser()).is_dir():
        return list_runs(call, folder)
    if group not in groups:
        raise refusal(group, f"no such group. {nearest(group, groups)}")
    choices = groups[group]
    if len(call.arguments) == 1:
        rows = [(name, document.description) for name, document in choices.items()]
        call.show(_listing({group: choices}), _table(rows))
        return 0
    name = call.arguments[1]
    if name not in choices:
        raise refusal(f"{group}={name}", f"no such choice. {nearest(name, choices)}")
    choice, text = read_choice(choices[name].file), shown_text(choices[name], group)
    if choice.of_class:
        lines = (f"{key}: {yaml_text(value)}\n" for key, value in choice.values.items() if key in choice.of_class)
        text += f"# Defaults of {choice.values[TARGET]}\n{''.join(lines)}"
    call.show(_listing({group: {name: choices[name]}}, text), [text.removesuffix("\n")])
    return 0


_HINT: Final = ("", "Choose with group=choice. `trainkit ls GROUP` describes each, `ls GROUP CHOICE` lists its keys.")


def _listing(groups: Mapping[str, Mapping[str, Document]], text: str | None = None) -> dict[str, Any]:
    choices = [
        {
            "group": group,
            "name": name,
            "description": document.description,
            "file": document.file,
            "target": document.values.get(TARGET),
        }
        for group, documents in groups.items()
        for name, document in documents.items()
    ]
    return {"version": 1, "choices": choices, "text": text, "runs": []}


def _groups(call: Call) -> dict[str, dict[str, Document]]:
    """Return group -> choice -> file; the user's own folders come first."""
    folders = (*call.config_dirs, shipped_conf())
    files = [(file.parent.name, file.stem, file) for folder in folders for file in sorted(folder.glob("*/*.yaml"))]
    files += [("recipe", file.parent.name, file) for file in sorted(shipped_recipes().glob("*/recipe.yaml"))]
    groups: dict[str, dict[str, Document]] = {}
    for group, name, file in files:
        choices = groups.setdefault(group, {})
        try:
            if name not in choices:
                choices[name] = read_document(file)
        except ConfigError as error:  # list the others despite one broken file
            sys.stderr.write(f"{error.problems[0]}\n")
    return {group: dict(sorted(groups[group].items())) for group in sorted(groups)}


def _table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max((len(name) for name, _ in rows), default=0)
    yield from (f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def list_runs(call: Call, root: Path) -> int:
    """Print the runs of a folder, the most recently updated first; return the exit code."""
    statuses = [(path, read_status(RunFolder(path))) for path in runs_below(root)]
    statuses.sort(key=lambda item: item[1].updated or 0.0, reverse=True)
    names = ("state", "note", "step", "resumable", "updated")
    runs = [
        {"folder": path, "process": status.where, **{name: getattr(status, name) for name in names}}
        for path, status in statuses
    ]
    header = ("run", "state", "step", "checkpoint", "updated", "process")
    rows = []
    for path, status in statuses:
        name = "".join(letter if letter.isprintable() else "?" for letter in str(path))
        step, checkpoint = "" if status.step is None else count(status.step), "yes" if status.resumable else "no"
        process = f"{status.where} ({status.note})" if status.note else status.where
        rows.append((name, status.state, step, checkpoint, _when(status.updated), process))
    lines = row_lines(header, rows) if statuses else [f"no runs in {root}"]
    call.show({"version": 1, "choices": [], "text": None, "runs": runs}, lines)
    return 0


def _when(moment: float | None) -> str:
    try:
        return "" if moment is None else datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # not a date
        return ""


def _list_layers(call: Call) -> int:
    """Print the layers of the model of a command line; return the exit code.

    Raises:
        ConfigError: the config has problems.
    """
    composition = call.compose()
    from trainkit.run.estimates.model_summary import summary_of  # noqa: PLC0415 - imports torch
    from trainkit.run.planning.plan import make_plan  # noqa: PLC0415
    from trainkit.trained.build import meta_model  # noqa: PLC0415

    plan = make_plan(composition.cfg)
    summary = summary_of(plan, meta_model(plan.cfg))
    call.show(asdict(summary), _layer_lines(summary))
    return 0


def _layer_lines(summary: ModelSummary) -> list[str]:
    header = ("layer", "class", "output", "parameters", "FLOPs")
    work = None if summary.flops is None else f", {compact(summary.flops)} FLOPs in a forward pass"
    total = "" if work is None else f"{work} of {count(summary.batch)} samples"
    trained = "" if summary.trained == summary.parameters else f", {count(summary.trained)} of them trained"
    return [
        *row_lines(header, [_cells(layer) for layer in summary.layers]),
        f"{count(summary.parameters)} parameters{trained}{total}",
        *([f"note: {summary.note}"] if summary.note else []),
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
