"""Evaluate a trained model, and write the results into a folder of its own."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from trainkit.api.trained import Trained, Which, compose_job, find_trained
from trainkit.callbacks.figures.sample_pictures import images_of, inputs_at
from trainkit.callbacks.tensorboard import grid, png_bytes
from trainkit.data.remarks import remarks
from trainkit.errors import ConfigError, UnreadableError
from trainkit.files import write_atomically, write_json_atomically
from trainkit.objectives.metrics import WORST
from trainkit.objectives.tables import Table
from trainkit.run.inference.job import Job, prepare, split_of
from trainkit.run.inference.launch import run_job
from trainkit.run.inference.request import JobRequest
from trainkit.storage import reporting
from trainkit.trainer.ownership import locked, new_folder

VERSION: Final = 1
"""Version of evaluation.json."""
FOLDER: Final = "evaluations"
_DRAFT: Final = ".new_"
"""Prefix of the name of a folder that is being written."""
_LOCK: Final = ".lock"
_STALE_S: Final = 60.0
"""Age in seconds after which a draft without a lock is treated as left by a killed process."""
_LONGEST: Final = 2_000
"""Largest number of characters of a text in the report."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """An evaluation and its folder."""

    folder: Path
    content: Mapping[str, Any]
    """Content of evaluation.json."""


def evaluate(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    split: str | None = None,
    checkpoint: Which = "last",
    config_dirs: Sequence[Path] = (),
    packages: Sequence[str] = (),
    log: Callable[[str], None] = lambda _line: None,
) -> Evaluated:
    """Evaluate a trained model on a split, each sample once, and write the results into `evaluations/NAME`.

    Args:
        path: a run, a checkpoint of one, or a folder or file with a written model.
        overrides: changes of the config: data, strategy, precision.
        split: the split; None: val.
        checkpoint: which checkpoint of a run.
        config_dirs: the user's config folders.
        packages: the user's packages that classes may come from.
        log: logs lines of progress.

    Raises:
        ConfigError: there is no model, or a key does not fit.
        CheckpointError: the weights are damaged, or those of another model.
        DataError: the dataset is absent, damaged or empty.
    """
    trained = find_trained(path, checkpoint)
    composition = compose_job(trained, overrides, verb="evaluate", config_dirs=config_dirs, packages=packages)
    cfg = composition.cfg
    wanted = split_of(cfg, split)
    job = prepare(cfg, JobRequest(verb="evaluate", split=wanted, source=trained.source))
    with reporting(trained.folder):
        name = f"{wanted}_{trained.label}"
        with _draft(trained.folder / FOLDER) as draft:
            processes = draft / "processes"
            processes.mkdir()
            result = run_job(job, processes, log=log)
            content = _content(trained, job, result)
            _write(draft, job, content)
            shutil.rmtree(processes)
            folder = new_folder(trained.folder / FOLDER / name)
            (draft / _LOCK).unlink()
            draft.rename(folder)  # which is empty
    return Evaluated(folder=folder, content=content)


@contextmanager
def _draft(root: Path) -> Iterator[Path]:
    """Give a new folder for an evaluation; deleted if it is still there at the end of the block.

    Drafts that killed evaluations have left are deleted first.
    """
    root.mkdir(exist_ok=True)
    for left in root.glob(f"{_DRAFT}*"):
        with suppress(ConfigError, UnreadableError, OSError):  # another process works in it
            if time.time() - left.lstat().st_mtime > _STALE_S:
                with locked(left / _LOCK):
                    shutil.rmtree(left)
    draft = root / f"{_DRAFT}{os.getpid()}_{time.time_ns()}"
    try:
        draft.mkdir(parents=True)  # another evaluation may have deleted the empty folder above
        with locked(draft / _LOCK):
            yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # it holds evaluations
            root.rmdir()


def _content(trained: Trained, job: Job, result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "model": trained.source.path,
        "checkpoint": trained.label,
        "step": trained.step,
        "split": job.request.split,
        "num_samples": result["num_samples"],
        "strategy": job.cfg.strategy["_target_"],
        "num_processes": len(job.tasks),
        "batch_size": job.eval_batch_size,
        "precision": job.parts.precision.value,
        "metrics": result["metrics"],
        "tables": result["tables"],
        "notes": [*remarks([job.dataset], job.parts.hooks), *result["notes"], *_nonfinite_losses(result["metrics"])],
    }


def _nonfinite_losses(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield a note for each loss that is no finite number.

    Example:
        >>> list(_nonfinite_losses({"val/loss": float("inf"), "val/accuracy": 0.5}))
        ['val/loss is inf: outputs of the model are NaN or infinite, and the other figures count them.']
    """
    for name, value in metrics.items():
        if name.endswith("/loss") and not math.isfinite(value):
            yield f"{name} is {value}: outputs of the model are NaN or infinite, and the other figures count them."


def _write(folder: Path, job: Job, content: Mapping[str, Any]) -> None:
    """Write the figures, a page with the tables, and the worst samples."""
    write_json_atomically(folder / "evaluation.json", content)
    worst = _worst_samples(job, content)
    pictures = _picture(folder, [one for _, one in worst])
    page = "\n".join(_page(job, content, worst, has_picture=pictures))
    write_atomically(folder / "report.md", f"{page}\n")


def _worst_samples(job: Job, content: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Return the inputs of the samples with the highest loss, by their indices."""
    table = content["tables"].get(f"{job.request.split}/{WORST}")
    places = [int(row[0]) for row in table["rows"]] if table else []
    return list(zip(places, inputs_at(job.dataset, places, getattr(job.parts.objective, "input", None)), strict=True))


def _picture(folder: Path, inputs: Sequence[Any]) -> bool:
    """Write the inputs as one picture if they are images of one size."""
    images = images_of(inputs)
    if not images or len({one.shape for one in images}) > 1:
        return False
    (folder / "worst.png").write_bytes(png_bytes(grid(np.stack(images))))
    return True


def _page(
    job: Job, content: Mapping[str, Any], worst: Sequence[tuple[int, Any]], *, has_picture: bool
) -> Iterator[str]:
    yield f"# {content['split']} of {content['model']}, checkpoint {content['checkpoint']}"
    yield ""
    yield "| metric | value |"
    yield "|---|---|"
    yield from (f"| {name} | {value} |" for name, value in content["metrics"].items())
    for name, table in content["tables"].items():
        yield from ("", f"## {name}", "")
        yield Table(columns=tuple(table["columns"]), rows=tuple(map(tuple, _named(table["rows"])))).markdown()
        if name.endswith(f"/{WORST}"):
            if has_picture:
                yield from ("", "In the order of the table, eight in a row:", "", "![worst](worst.png)")
            yield from _texts(job.dataset, worst)
    yield from ("", *(f"note: {note}" for note in content["notes"]))


def _named(rows: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """Yield rows with NaN for null, which JSON has in its place."""
    for row in rows:
        yield [float("nan") if cell is None else cell for cell in row]


def _texts(dataset: Any, worst: Sequence[tuple[int, Any]]) -> Iterator[str]:
    """Yield the worst samples that are texts, or tokens that the dataset decodes."""
    decode = getattr(dataset, "decode", None)
    for place, sample in worst:
        if isinstance(sample, str):
            text = sample
        elif callable(decode) and isinstance(sample, Tensor) and not sample.is_floating_point() and sample.dim() == 1:
            text = str(decode(sample.tolist()))
        else:
            continue
        shown = text[:_LONGEST].replace("```", "'''")
        yield from ("", f"Sample {place}:", "", "```text", shown, "```")
