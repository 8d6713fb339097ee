"""Export the trained model of a run folder: at the end of the run, and by `trainkit export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainkit.config.commands import shell_word
from trainkit.config.grammar import refusal
from trainkit.config.identity import fingerprint, run_config
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem, UnreadableError
from trainkit.exporting.checked_file import CheckedFile
from trainkit.exporting.checking import real_samples
from trainkit.exporting.folder import Exported, write_export
from trainkit.exporting.formats import Format, format_named
from trainkit.exporting.trained import TrainedModel
from trainkit.files import naming, read_map
from trainkit.run.folder.model_file import Which, checkpoint_name, checkpoint_of, refuse_foreign
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.build import average_of, model_with
from trainkit.run.planning.memory import meta_model
from trainkit.strategies.tensor_shards import averaged_weights

AVERAGES: Final = "optimizer/average/"
"""Prefix of the keys of averages in a checkpoint."""
MODEL: Final = "model"
"""The folder of the export that every run writes."""


def export_at_end(
    folder: RunFolder,
    cfg: RunConfig,
    metrics: Mapping[str, Any],
    *,
    working: Callable[[], None] = lambda: None,
    form: Format | None = None,
) -> Exported:
    """Write `RUN/model`: the last weights, and `best` if those differ.

    Args:
        folder: the run folder; the caller holds its lock.
        cfg: the config of the run.
        metrics: metrics at the end of the run, for the model card.
        working: called repeatedly meanwhile, to show progress.

        form: writes the file, with or without a check; None: without a check.

    Raises:
        CheckpointError: a checkpoint is missing or damaged, or the model cannot be exported.
        StorageError: a file cannot be written; an earlier export stays.
    """
    trained = partial(trained_model, folder, cfg, metrics=metrics, working=working)
    name, best = (checkpoint_name(folder, which) for which in ("last", "best"))
    last, average = trained("last"), average_of(cfg)
    beside = [trained("best")] if best not in (None, name) else []
    if average is not None and average.export and any(key.startswith(AVERAGES) for key in last.weights.tensors):
        weights = replace(last.weights, tensors=averaged_weights(last.weights.tensors))
        beside.append(replace(last, weights=weights, which="average"))
    form = form or format_named("safetensors")
    return write_export(last, form, folder.path / MODEL, folder.take(), beside=beside)


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
    folder, cfg = trained_run(path)
    with folder.lock():
        result = folder.read_result() or {}
        metrics = result.get("metrics") or {}
        if to == "safetensors":
            done = export_at_end(folder, cfg, metrics, form=CheckedFile(samples=partial(real_samples, cfg)))
            if result:
                kept = {name: value for name, value in result.items() if not name.startswith("model")}
                folder.write_report(folder.result, {**kept, **done.to_result()})
            return done
        target = folder_of_format(path / "exports", to)
        trained = trained_model(folder, cfg, checkpoint or "last", metrics=metrics)
        return write_export(trained, form, target, folder.take())


def trained_run(path: Path) -> tuple[RunFolder, RunConfig]:
    """Return a run folder and its config; import no class of a foreign package.

    Raises:
        ConfigError: it is not a run, or the package of its model is not allowed.
    """
    if not (path / "resolved.yaml").is_file():
        raise ConfigError([Problem(key=str(path), rule="is not a run folder: it has no resolved.yaml.")])
    cfg = run_config(path)
    refuse_foreign(cfg.model)
    return RunFolder(path), cfg


def folder_of_format(parent: Path, to: str) -> Path:
    """Return the folder of a format, after its parent was made.

    Raises:
        StorageError: the parent cannot be made.
    """
    with naming(parent):
        parent.mkdir(exist_ok=True)
    return parent / to


def trained_model(
    folder: RunFolder,
    cfg: RunConfig,
    which: Which,
    *,
    metrics: Mapping[str, Any],
    working: Callable[[], None] = lambda: None,
) -> TrainedModel:
    """Return the trained model of a run, with the weights of one of its checkpoints; arguments as in `export_at_end`.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    weights = checkpoint_of(folder, which)
    facts = {
        "run": f"{cfg.name}/{folder.path.absolute().name}",
        "command": _command(folder),
        "fingerprint": fingerprint(cfg),
        "metrics": dict(metrics) if which == "last" else {},
    }

    return TrainedModel(
        cfg=cfg,
        weights=weights,
        which=which,
        skeleton=lambda: meta_model(cfg),
        build=lambda tensors: model_with(cfg, tensors).eval(),
        facts=facts,
        working=working,
    )


def _command(folder: RunFolder) -> str | None:
    """Return the command that started the run, as far as it is known."""
    try:
        words = read_map(folder.environment, {"argv": list})["argv"]
    except UnreadableError:
        return None
    if not words or Path(str(words[0])).name not in ("trainkit", "__main__.py"):  # a program that calls trainkit.train
        return None
    return " ".join(map(shell_word, ["trainkit", *map(str, words[1:])]))
