"""Evaluate a trained model and predict with it: compose the config of the job, run it, write its result."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainkit.callbacks.figures import images_of, inputs_at
from trainkit.callbacks.tensorboard import grid, write_png
from trainkit.config.check import check_names, check_values
from trainkit.config.compose import compose
from trainkit.config.composition import Composition, Level
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.resume import compose_resumed
from trainkit.config.targets.allowed import TARGET
from trainkit.data.splits import remarks
from trainkit.errors import ConfigError, Problem, UnreadableError, refuse
from trainkit.files import naming, read_bytes, read_map, reporting, write_atomically, write_json_atomically
from trainkit.objectives.metrics import WORST
from trainkit.objectives.tables import Table
from trainkit.run.jobs import Job, JobRequest, Verb, prepare, run_job, split_of
from trainkit.run.planning.plan import refuse_open_workers
from trainkit.trained.build import Which
from trainkit.trained.model import Trained, find_trained
from trainkit.trained.predict import NO_SPACE, Chunks, Parts, check_format, files_of, ids_of, write_rows
from trainkit.trainer.ownership import locked, new_folder

_VERB_KEYS: Final[Mapping[Verb, str]] = {"evaluate": "eval.batch_size", "predict": "predict"}
"""Keys that only one of the verbs uses."""
_KEYS: Final = ("data", "objective", "strategy", "precision", "loader", "compile", "cv", "supervisor")
"""The groups and sections that have an effect on a job."""
VERSION: Final = 1
"""Version of evaluation.json."""
FOLDER: Final = "evaluations"
_DRAFT: Final = ".new_"
"""Prefix of the name of a folder that is being written."""
_STALE_S: Final = 60.0
"""Age in seconds after which a draft without a lock is treated as left by a killed process."""
_LONGEST: Final = 2_000
"""Largest number of characters of a text in the report."""
_RECORD: Final = "prediction.json"
"""File that describes the prediction whose parts a folder holds."""
_LOCK: Final = ".lock"
_MAX_MANIFEST: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """A trained model, and how it is to be used."""

    path: Path
    """A run, a checkpoint of one, or a folder or file with a written model."""
    overrides: Sequence[str] = ()
    """Changes of the config: data, strategy, and the keys of the job."""
    split: str | None = None
    """The split; None: val."""
    checkpoint: Which = "last"
    """Which checkpoint of a run."""
    config_dirs: Sequence[Path] = ()
    """The user's config folders."""
    packages: Sequence[str] = ()
    """The user's packages that classes may come from."""
    log: Callable[[str], None] = lambda _line: None
    """Logs lines of progress."""


def _prepared(arguments: JobArguments, verb: Verb) -> tuple[Trained, Job]:
    """Find the model, and prepare its job: on one device, unless the command names a strategy.

    Raises:
        ConfigError: there is no model, a key has no effect on the job, or does not fit.
    """
    trained, overrides = find_trained(arguments.path, arguments.checkpoint), arguments.overrides

    def is_own(key: str) -> bool:
        return key == _VERB_KEYS[verb] or key.startswith(f"{_VERB_KEYS[verb]}.")

    keys = {key_of(line): key_of(line).partition(".")[0] for line in overrides}
    allowed = (*_KEYS, *(() if trained.run is not None else ("recipe",)))
    reasons = {"model": "the model is the trained one.", "cluster": "it runs on this machine."}
    hint = f"it takes {', '.join(_KEYS)} and their keys."
    rules = {
        key: f"has no effect on {verb}: {reasons.get(group, hint)}"
        for key, group in keys.items()
        if group not in allowed and not is_own(key)
    }
    problems = [Problem(key=key, rule=rule, origin=COMMAND_LINE) for key, rule in rules.items()]
    if trained.run is None and not {"data", "recipe"} & {*keys.values()}:
        rule = f"the run of {trained.path} is not known. Give its data and objective: data=... objective=..., or "
        problems.append(Problem(key="data", rule=f"{rule}recipe=NAME."))
    refuse(problems)
    searched: dict[str, Any] = {"config_dirs": arguments.config_dirs, "packages": arguments.packages}
    if trained.run is None:
        composition = compose([*([] if "recipe" in keys else ["recipe=null"]), *overrides], **searched)
    else:
        composition = compose_resumed(trained.run, overrides, **searched)
    composition = _of_job(composition, keys)
    of_training = "has no effect on a training"
    problems = [item for item in check_names(composition) if not (is_own(item.key) and of_training in item.rule)]
    refuse(problems or check_values(composition))
    cfg = composition.cfg
    try:
        refuse_open_workers(cfg)
    except ConfigError as error:
        raise composition.with_origins(error) from error
    return trained, prepare(
        cfg, JobRequest(verb=verb, split=split_of(cfg, arguments.split), weights=str(trained.description.absolute()))
    )


def _of_job(composition: Composition, keys: Mapping[str, str]) -> Composition:
    """Return a composition without what only a training uses."""
    values = dict(composition.values)
    for group in ("data", "objective"):
        if f"{group}.{TARGET}" in keys:  # the keys that the run gave to another class
            names = {name for name in values[group] if composition.origin((group, name)).level is Level.command_line}
            values[group] = {name: value for name, value in values[group].items() if name in names}
    values |= {"resume": None, "init_from": None}
    values |= {group: {} for group in ("callbacks", "logger", "cluster", "optimizers")}
    if "strategy" not in keys.values():
        values["strategy"] = {"_target_": "trainkit.strategies.OneDevice", "device": "auto"}
    return replace(composition, values=values)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation and its folder."""

    folder: Path
    content: Mapping[str, Any]
    """Content of evaluation.json."""


def evaluate(arguments: JobArguments) -> Evaluation:
    """Evaluate a trained model on a split, each sample once, and write the results into `evaluations/NAME`.

    Raises:
        ConfigError: there is no model, or a key does not fit.
        CheckpointError: the weights are damaged, or those of another model.
        DataError: the dataset is absent, damaged or empty.
    """
    trained, job = _prepared(arguments, "evaluate")
    root = trained.folder / FOLDER
    with reporting(trained.folder), _draft(root) as draft:
        processes = draft / "processes"
        processes.mkdir()
        content = _content(trained, job, run_job(job, processes, log=arguments.log))
        write_json_atomically(draft / "evaluation.json", content)
        write_atomically(draft / "report.md", "\n".join([*_report(job, content, draft), ""]))
        shutil.rmtree(processes)
        folder = new_folder(root / f"{job.request.split}_{trained.label}")
        (draft / _LOCK).unlink()
        draft.rename(folder)  # which is empty
    return Evaluation(folder=folder, content=content)


@contextmanager
def _draft(root: Path) -> Iterator[Path]:
    """Yield a new folder for an evaluation; it is deleted if it is still there at the end of the block.

    Drafts that killed evaluations have left are deleted first.
    """
    root.mkdir(exist_ok=True)
    for stale in root.glob(f"{_DRAFT}*"):
        with suppress(ConfigError, UnreadableError, OSError):  # another process works in it
            if time.time() - stale.lstat().st_mtime > _STALE_S:
                with locked(stale / _LOCK):
                    shutil.rmtree(stale)
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
    nonfinite = [
        f"{name} is {value}: outputs of the model are NaN or infinite, and the other figures count them."
        for name, value in result["metrics"].items()
        if name.endswith("/loss") and not math.isfinite(value)
    ]
    return {
        "version": VERSION,
        "model": trained.path,
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
        "notes": [*remarks([job.dataset], job.parts.hooks), *result["notes"], *nonfinite],
    }


def _report(job: Job, content: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the lines of a page with the figures, the tables and the worst samples; images are written into the folder
    as one picture, if all are of one size.
    """
    yield f"# {content['split']} of {content['model']}, checkpoint {content['checkpoint']}"
    yield from ("", "| metric | value |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in content["metrics"].items())
    for name, table in content["tables"].items():
        yield from ("", f"## {name}", "")
        rows = tuple(tuple(math.nan if cell is None else cell for cell in row) for row in table["rows"])
        yield Table(columns=tuple(table["columns"]), rows=rows).markdown()
        if name != f"{content['split']}/{WORST}":
            continue
        indices = [int(row[0]) for row in table["rows"]]
        worst = inputs_at(job.dataset, indices, getattr(job.parts.objective, "input", None))
        images = images_of(worst)
        if images and len({image.shape for image in images}) == 1:
            write_png(folder / "worst.png", grid(np.stack(images)))
            yield from ("", "In the order of the table, eight in a row:", "", "![worst](worst.png)")
        decode = getattr(job.dataset, "decode", None)
        for index, sample in zip(indices, worst, strict=True):
            text = sample if isinstance(sample, str) else None
            if callable(decode) and isinstance(sample, Tensor) and not sample.is_floating_point() and sample.dim() == 1:
                text = str(decode(sample.tolist()))
            if text is not None:
                yield from ("", f"Sample {index}:", "", "```text", text[:_LONGEST].replace("```", "'''"), "```")
    yield from ("", *(f"note: {note}" for note in content["notes"]))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction, complete or interrupted."""

    files: tuple[Path, ...]
    status: str
    """`finished`, or the reason why it stopped."""
    num_rows: int
    num_done: int
    """Number of computed rows; the same command continues after them."""
    num_nonfinite: int = 0
    """Rows of the file that hold NaN or infinity."""


def predict_to_file(arguments: JobArguments, *, out: Path, overwrite: bool = False) -> Prediction:
    """Predict every sample of a split, in its order, exactly once, into a file.

    An interrupted prediction leaves `OUT.parts`, and the same call continues it to the same bytes.

    Args:
        arguments: the model, and the split.
        out: the file; its ending gives the format.
        overwrite: whether to replace an existing file, and to drop the parts of another prediction.

    Raises:
        ConfigError: there is no model, the file exists, or a key does not fit.
        CheckpointError: the weights are damaged, or those of another model.
        DataError: the dataset is absent, damaged or empty, or samples have outputs of several shapes.
    """
    check_format(out)
    refused = [] if out.parent.is_dir() else [(out, "its folder does not exist.")]
    for file in filter(os.path.lexists, files_of(out)):
        if not overwrite:
            refused.append((file, "exists already. Give another name, or --overwrite."))
        elif file.is_dir() and not file.is_symlink():
            refused.append((file, "is a folder. Give another name."))
    if refused:
        raise ConfigError(_file_problem(file, rule) for file, rule in refused)
    (trained, job), log = _prepared(arguments, "predict"), arguments.log
    folder, chunks, nonfinite = out.with_name(f"{out.name}.parts"), job.chunks, 0
    for note in remarks([job.dataset], job.parts.hooks):
        log(f"note: {note}")
    with reporting(out.parent), _parts_folder(folder, _identity(trained, job), overwrite=overwrite):
        parts, status = Parts(folder=folder, chunks=chunks), "finished"
        done = set(parts.done())
        if done:
            log(f"continues after {sum(map(chunks.rows_of, done)):,} of {chunks.num_rows:,} rows")
        if todo := [chunk for chunk in range(chunks.count) if chunk not in done]:
            processes = folder / "processes"
            shutil.rmtree(processes, ignore_errors=True)
            processes.mkdir()
            request = replace(job.request, parts=str(folder.absolute()), todo=todo)
            try:
                status = str(run_job(replace(job, request=request), processes, log=log)["status"])
            except BaseException:
                if not parts.done():  # there is nothing to continue
                    _remove(parts)
                raise
        num_done = parts.num_rows_done()
        if status == "finished":
            write_rows(out, parts, partial(ids_of, job.dataset), name=job.outputs.kind)
            blocks = (rows.reshape(len(rows), -1) for rows in parts.contents())
            nonfinite = sum(int((~np.isfinite(rows)).any(-1).sum()) for rows in blocks)
            _remove(parts)
    return Prediction(
        files=files_of(out), status=status, num_rows=chunks.num_rows, num_done=num_done, num_nonfinite=nonfinite
    )


def _file_problem(file: Path, rule: str) -> Problem:
    return Problem(key="--out", value=str(file), rule=rule, origin=COMMAND_LINE)


def _identity(trained: Trained, job: Job) -> dict[str, Any]:
    """Return everything that decides the bytes of the parts, as JSON."""
    cfg = job.cfg
    return {
        "version": 1,
        # of the hashes of the weights
        "weights": hashlib.sha256(read_bytes(trained.description, limit=_MAX_MANIFEST)).hexdigest(),
        "data": cfg.data,
        "cv": None if cfg.cv.folds is None else [cfg.cv.folds, cfg.cv.fold, cfg.cv.seed],
        "split": job.request.split,
        "num_rows": job.chunks.num_rows,
        "objective": cfg.objective,
        "outputs": cfg.predict.outputs,
        "batch_size": cfg.predict.batch_size,
        "threads": cfg.predict.threads,
        "precision": job.parts.precision.value,
        "compile": cfg.compile.mode,
        "device": sorted({task.device.partition(":")[0] for task in job.tasks}),
        # Ranks that compute one forward pass together may round differently from one device.
        "strategy": cfg.strategy if job.is_together else None,
        "torch": torch.__version__,
    }


@contextmanager
def _parts_folder(folder: Path, identity: Mapping[str, Any], *, overwrite: bool) -> Iterator[None]:
    """Create the folder of the parts, or continue in it; it is locked for the duration of the block.

    Raises:
        ConfigError: it holds the parts of another prediction, or another process uses it.
    """
    with naming(folder.parent, remedy=NO_SPACE), suppress(FileExistsError):
        folder.mkdir()
        write_json_atomically(folder / _RECORD, identity)
    try:
        record = read_map(folder / _RECORD, {"version": int, "weights": str})
    except UnreadableError:
        rule = "exists and was not written by a prediction. Rename it, or give another file."
        raise ConfigError([_file_problem(folder, rule)]) from None
    with locked(folder / _LOCK):
        differing = [key for key, value in identity.items() if record.get(key) != value]
        if differing and not overwrite:
            old, new = record.get(differing[0]), identity[differing[0]]
            short = isinstance(old, int | str) and len(str(old)) < 40
            values = f", {old} there and {new} here" if short else ""
            rule = (
                f"holds the parts of another prediction, which differs in {', '.join(differing)}{values}. Continue "
                "that one, give another file, or drop its parts by --overwrite."
            )
            raise ConfigError([_file_problem(folder, rule)])
        if differing:
            Parts(folder=folder, chunks=Chunks(num_rows=0, batch_size=1)).remove()
            write_json_atomically(folder / _RECORD, identity)
        yield


def _remove(parts: Parts) -> None:
    """Delete what predictions wrote into the folder of the parts, and the folder if nothing else is in it."""
    parts.remove()
    shutil.rmtree(parts.folder / "processes", ignore_errors=True)
    for name in (_RECORD, _LOCK):
        (parts.folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        parts.folder.rmdir()
