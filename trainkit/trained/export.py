"""The folder of an exported model: written next to its final place, then moved there as a whole.

    model.safetensors   the file of the format
    config.yaml         the node that builds the model; size and SHA-256 of each file
    README.md           the model card
    .owner              the token of the run: a later export of this run may replace the folder

At any moment, and after any crash, a reader sees either a complete export or none.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from trainkit.adapters.average import Average
from trainkit.config.commands import repeating_command
from trainkit.config.grammar import refusal
from trainkit.config.identity import fingerprint, run_config
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build
from trainkit.errors import ConfigError, Problem, UnreadableError
from trainkit.files import (
    MAX_YAML_BYTES,
    naming,
    num_bytes,
    open_regular,
    parse_yaml,
    read_map,
    read_text,
    size_of,
    sync_folder,
    write_json_atomically,
)
from trainkit.strategies.tensor_shards import averaged_weights
from trainkit.trained.build import Which, checkpoint_name, checkpoint_of
from trainkit.trained.formats import FORMATS, Format, TrainedModel, format_named, write_checked_weights
from trainkit.trained.model import BEST, CONFIG, refuse_foreign
from trainkit.trainer.checkpoint.tensors import write_bytes
from trainkit.trainer.manifest import FileRecord, owner_of_run
from trainkit.trainer.ownership import MARK, OwnershipToken, free_name, locked, print_notice

MODEL: Final = "model"
"""The folder of the export that every run writes."""
CARD: Final = "README.md"
_AVERAGES: Final = "optimizer/average/"
"""Prefix of the keys of averages in a checkpoint."""
_BESIDE: Final = (BEST, "average")
"""Names of all subfolders of the folder of the last weights, each named after its weights."""
_CHUNK: Final = 8 << 20
_SHOWN: Final = ("model", "data", "objective", "optimizer", "schedule", "precision", "epochs", "steps")
"""Parts of the config that the card shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A written export."""

    folder: Path
    num_bytes: int
    """Total size of the files."""
    seconds: float
    notes: tuple[str, ...] = ()
    """Sentences for the screen: how the files were checked, which sizes they take."""

    def to_result(self) -> dict[str, Any]:
        """Return the entries of result.json."""
        return {"model": str(self.folder), "model_bytes": self.num_bytes, "model_seconds": self.seconds}


def export_at_end(
    run: Path,
    cfg: RunConfig,
    metrics: Mapping[str, Any],
    owner: OwnershipToken,
    *,
    working: Callable[[], None] = lambda: None,
    form: Format = FORMATS["safetensors"],
) -> Exported:
    """Write `RUN/model`: the last weights, and `best` if those differ.

    Args:
        run: the run folder; the caller holds its lock.
        cfg: the config of the run.
        metrics: metrics at the end of the run, for the model card.
        owner: the token of the run.
        working: called repeatedly meanwhile, to show progress.
        form: writes the file, with or without a check.

    Raises:
        CheckpointError: a checkpoint is missing or damaged, or the model cannot be exported.
        StorageError: a file cannot be written; an earlier export stays.
    """
    last = trained_model(run, cfg, "last", metrics=metrics, working=working)
    beside, best = [], checkpoint_name(run, "best")
    if best not in (None, checkpoint_name(run, "last")):
        beside.append(trained_model(run, cfg, "best", working=working))
    average: Average | None = build(cfg.average, "average") if cfg.average else None
    if average is not None and average.export and any(key.startswith(_AVERAGES) for key in last.weights.tensors):
        weights = replace(last.weights, tensors=averaged_weights(last.weights.tensors))
        beside.append(replace(last, weights=weights, which="average"))
    return write_export(last, form, run / MODEL, owner, beside=beside)


def export_run(path: Path, *, to: str, checkpoint: Which | None = None) -> Exported:
    """Export the model of a run that has ended: into `RUN/model`, or in another format into `RUN/exports/FORMAT`.

    Args:
        path: the run folder.
        to: the format.
        checkpoint: the weights to export; None: the last, and for `safetensors` also the best.

    Raises:
        ConfigError: there is no such format or run, the run is in use, or the package of its model is not allowed.
        CheckpointError, StorageError: as `export_at_end`.
    """
    form = format_named(to)
    if to == "safetensors" and checkpoint is not None:
        rule = "has no effect: safetensors writes the last weights, and also the best ones."
        raise refusal("--checkpoint", rule)
    cfg = config_of_trained(path)
    with locked(path / ".lock"):
        try:
            result: dict[str, Any] = read_map(path / "result.json", {})
        except UnreadableError:
            result = {}
        metrics = result.get("metrics") or {}
        if to == "safetensors":
            checked = replace(form, write=write_checked_weights)
            done = export_at_end(path, cfg, metrics, owner_of_run(path), form=checked)
            if result:
                others = {name: value for name, value in result.items() if not name.startswith("model")}
                write_json_atomically(path / "result.json", {**others, **done.to_result()})
            return done
        trained = trained_model(path, cfg, checkpoint or "last", metrics=metrics)
        return write_export(trained, form, folder_of_format(path / "exports", to), owner_of_run(path))


def config_of_trained(path: Path) -> RunConfig:
    """Return the config of a run; import no class of a foreign package.

    Raises:
        ConfigError: it is not a run, or the package of its model is not allowed.
    """
    if not (path / "resolved.yaml").is_file():
        raise ConfigError([Problem(key=str(path), rule="is not a run folder: it has no resolved.yaml.")])
    cfg = run_config(path)
    refuse_foreign(cfg.model)
    return cfg


def folder_of_format(parent: Path, to: str) -> Path:
    """Return the folder of a format, after its parent was made.

    Raises:
        StorageError: the parent cannot be made.
    """
    with naming(parent):
        parent.mkdir(exist_ok=True)
    return parent / to


def trained_model(
    run: Path,
    cfg: RunConfig,
    which: Which,
    *,
    metrics: Mapping[str, Any] | None = None,
    working: Callable[[], None] = lambda: None,
) -> TrainedModel:
    """Return the trained model of a run, with the weights of one of its checkpoints; arguments as in `export_at_end`.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    environment: Mapping[str, Any] = {}
    with suppress(UnreadableError):
        environment = read_map(run / "environment.json", {"argv": list}, optional={"begun": dict})
    command = repeating_command(environment)
    facts = {
        "run": f"{cfg.name}/{run.absolute().name}",
        # the path of a program that calls trainkit.train, or of a notebook's kernel, tells a stranger nothing
        "command": command if command.partition(" ")[0] == "trainkit" else None,
        "fingerprint": fingerprint(cfg),
        "metrics": dict(metrics or {}) if which == "last" else {},
    }
    return TrainedModel(cfg=cfg, weights=checkpoint_of(run, which), which=which, facts=facts, working=working)


def write_export(
    last: TrainedModel, form: Format, folder: Path, owner: OwnershipToken, *, beside: Sequence[TrainedModel] = ()
) -> Exported:
    """Export a model into a folder, replacing an earlier export of the run.

    Args:
        last: the model with the last weights.
        form: the format.
        folder: the folder, whose parent exists; if another run owns it, FOLDER-2 is used.
        owner: the run.
        beside: the same model with other weights, each for the subfolder named by its `which`.

    Raises:
        CheckpointError: the weights are damaged, or the format refuses the model; nothing has changed.
        StorageError: a file cannot be written, for example because the disk is full; nothing has changed.
    """
    began, size, notes = time.perf_counter(), 0, list[str]()
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2)))
    final = next(path for path in names if not os.path.lexists(path) or owner.owns(path))
    if final != folder and not os.path.lexists(final):
        print_notice(f"{folder} was not written by this run: it is left where it is, and {final} is used.")
    with naming(final), _in_place_of(final, owner) as draft:
        for trained in (last, *beside):
            target = draft if trained is last else draft / trained.which
            if target != draft:
                owner.make(target)
            note, written = _write(trained, form, target)
            notes, size = [*notes, *([note] if note else [])], size + written
    seconds = time.perf_counter() - began
    return Exported(folder=final, num_bytes=size, seconds=seconds, notes=tuple(dict.fromkeys(notes)))


def _write(trained: TrainedModel, form: Format, draft: Path) -> tuple[str | None, int]:
    """Write the files of a format, the description and the card; return the note and the size of the files."""
    written = form.write(trained, draft)
    paths = sorted(path for path in draft.rglob("*") if path.is_file() and path.name != MARK)
    named = {path.relative_to(draft).as_posix(): path for path in paths}
    files = {name: written.files.get(name) or _record(path) for name, path in named.items()}
    config = {
        "format": 1,
        "model": dict(trained.cfg.model),
        "checkpoint": trained.which,
        "step": trained.weights.checkpoint.step,
        **trained.facts,
        "files": {name: asdict(record) for name, record in files.items()},
    }
    write_bytes(draft / CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())
    write_bytes(draft / CARD, _card(trained, files, form.loading, written.note).encode())
    sync_folder(draft)
    return written.note, sum(record.num_bytes for record in files.values())


def _record(path: Path) -> FileRecord:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return FileRecord(num_bytes=size_of(path), sha256=digest.hexdigest())


@contextmanager
def _in_place_of(final: Path, owner: OwnershipToken) -> Iterator[Path]:
    """Yield a new folder; it replaces `final` if the block ends without an error, else it is deleted."""
    hidden = f".{final.name}"
    owner.remove_tree(final.with_name(f"{hidden}.new"))  # left by a kill
    _delete(final.with_name(f"{hidden}.old"), owner, final)
    draft, old = free_name(final.with_name(f"{hidden}.new")), free_name(final.with_name(f"{hidden}.old"))
    owner.make(draft)
    try:
        yield draft
        if os.path.lexists(final):
            final.rename(old)
        draft.rename(final)
        sync_folder(final.parent)
    finally:
        owner.remove_tree(draft)
    _delete(old, owner, final)


def _delete(folder: Path, owner: OwnershipToken, final: Path) -> None:
    """Delete an earlier export; files that no export wrote are kept in `NAME.aside`."""
    if not owner.owns(folder):
        return
    within = {f"{name}/": folder / name for name in _BESIDE}
    files = [f"{prefix}{name}" for prefix, path in within.items() for name in owner.remove(path, _written_names(path))]
    files += [name for name in owner.remove(folder, _written_names(folder)) if name not in _BESIDE]
    if files:
        aside = folder.rename(free_name(final.with_name(f"{final.name}.aside")))
        text = f"holds the files of {final} that this run did not write; {final} is replaced: {', '.join(files)}."
        print_notice(f"{aside} {text}")


def _written_names(folder: Path) -> re.Pattern[str]:
    """Return a pattern of the file names that an export lists as its own."""
    try:
        content = parse_yaml(read_text(folder / CONFIG, limit=MAX_YAML_BYTES))
    except (UnreadableError, ValueError):
        content = None
    files = content.get("files") if isinstance(content, Mapping) else None
    names = [CONFIG, CARD, *(str(name) for name in (files if isinstance(files, Mapping) else ()))]
    return re.compile("|".join(re.escape(name) for name in names))


def _card(trained: TrainedModel, files: Mapping[str, FileRecord], loading: str, note: str | None) -> str:
    """Return the model card as Markdown; `loading` is the section of the format, `note` a sentence for it."""
    facts, cfg = trained.facts, trained.cfg
    coded = {name: facts[name] and f"`{facts[name]}`" for name in ("command", "fingerprint")}
    rows = {
        "weights": f"the {trained.which} ones, of step {trained.weights.checkpoint.step:,}",
        "recipe": cfg.recipe,
        "run": facts["run"],
        **coded,
        "seed": cfg.seed,
        "files": ", ".join(f"{name} ({num_bytes(record.num_bytes)})" for name, record in files.items()),
    }
    table = "".join(f"| {name} | {_cell(value)} |\n" for name, value in rows.items() if value is not None)
    metrics = facts["metrics"] if trained.which == "last" else {}
    measured = "".join(f"| {_cell(name)} | {value:.6g} |\n" for name, value in metrics.items() if value is not None)
    values = cfg.to_dict()
    batch = {name: values["batch"][name] for name in ("global_size", "micro_size")}
    shown = {**{name: values[name] for name in _SHOWN}, "batch": batch}
    parts = [
        f"# {cfg.name}\n",
        f"| | |\n|---|---|\n{table}",
        f"## Metrics\n\n| at the end of the run | |\n|---|---|\n{measured}" if metrics else None,
        f"## Loading\n\n{loading}",
        note and f"{note}\n",
        "## Training\n",
        f"```yaml\n{yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)}```\n",
    ]
    return "\n".join(part for part in parts if part is not None)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
