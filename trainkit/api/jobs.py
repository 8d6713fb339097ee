"""Evaluate a trained model and predict with it: find it, compose the config of the job, run it, write its result."""

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
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.callbacks.figures import images_of, inputs_at
from trainkit.callbacks.tensorboard import grid, png_bytes
from trainkit.cluster.host import use_device
from trainkit.config.check import check_names, check_values
from trainkit.config.compose import compose
from trainkit.config.composition import Composition, Level
from trainkit.config.door import called_from
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.identity import run_config
from trainkit.config.resume import compose_resumed
from trainkit.config.sections import LoaderConfig
from trainkit.config.targets.allowed import TARGET, allow_packages
from trainkit.config.targets.build import build
from trainkit.data.hooks import Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import remarks, size_of
from trainkit.errors import ConfigError, Problem, UnreadableError
from trainkit.files import (
    MAX_YAML_BYTES,
    expect_map,
    naming,
    open_regular,
    parse_yaml,
    read_bytes,
    read_map,
    read_text,
    reporting,
    write_atomically,
    write_json_atomically,
)
from trainkit.inference.parts import Chunks, Parts, existing_files, files_of, format_of, ids_of, uneven_rows, write_rows
from trainkit.inference.predicting import Outputs, predicted
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Loss, Model, Objective, Supervised
from trainkit.objectives.metrics import WORST
from trainkit.objectives.tables import Table
from trainkit.run.folder.model_file import find_checkpoint, load_model, refuse_unknown_checkpoint
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.inference.job import Job, prepare, split_of
from trainkit.run.inference.launch import run_job
from trainkit.run.inference.request import JobRequest, Source, Verb
from trainkit.run.planning.build import build_objective
from trainkit.run.planning.plan import refuse_open_workers
from trainkit.strategies.base import LocalModel, PlanContext
from trainkit.strategies.collectives import LocalCollective
from trainkit.trainer.manifest import read_manifest
from trainkit.trainer.ownership import locked, new_folder

Which = Literal["best", "last"]

_MODELS: Final = ("config.yaml", "model.yaml")
"""Files that describe an exported model."""
_WEIGHTS: Final = "model.safetensors"
_OWN: Final[Mapping[Verb, str]] = {"evaluate": "eval.batch_size", "predict": "predict"}
"""Keys that only one of the verbs uses."""
_KEYS: Final = ("data", "objective", "strategy", "precision", "loader", "compile", "cv", "supervisor")
"""The groups and sections that have an effect on a job."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model that the user named."""

    folder: Path
    """Folder for evaluations: the run, or the folder of an exported model outside of a run."""
    source: Source
    run: Path | None
    """The run whose data and objective the job has by default; None: the command names them."""
    label: str
    """Name of the weights: `last`, `best`, the name of the checkpoint, or the path of the exported model in its run."""
    step: int | None = None
    """Updates of the weights, if they come from a checkpoint."""


def find_trained(path: Path, which: Which) -> Trained:
    """Find what a path names: a run, a checkpoint of one, or a folder or file with a written model.

    Raises:
        ConfigError: there is no model.
        CheckpointError: the run has no such checkpoint, or it is incomplete.
    """
    if not path.exists():
        raise ConfigError([_problem(path, "there is no such file or folder.")])
    if (path / "resolved.yaml").is_file():
        found = find_checkpoint(RunFolder(path), which)
        source = Source(path=str(path), checkpoint=str(found.folder), which=which)
        return Trained(folder=path, source=source, run=path, label=which, step=found.step)
    if (path / "manifest.json").is_file() and (path.absolute().parent.parent / "resolved.yaml").is_file():
        run, step = path.absolute().parent.parent, read_manifest(path).step
        source = Source(path=str(run), checkpoint=str(path), which=which)
        return Trained(folder=run, source=source, run=run, label=path.name, step=step)
    folder = path.parent if path.name == _WEIGHTS and path.is_file() else path
    if not any((folder / name).is_file() for name in _MODELS):
        rule = (
            "holds no model: it is neither a run, nor a checkpoint of one, nor a folder with a "
            f"{_WEIGHTS} and the {' or '.join(_MODELS)} that builds its model."
        )
        raise ConfigError([_problem(path, rule)])
    source = Source(path=str(folder), which=which)
    above = next((one for one in folder.absolute().parents[:3] if (one / "resolved.yaml").is_file()), None)
    if above is None:
        return Trained(folder=folder, source=source, run=_first_member(folder), label=which)
    # An export is replaced as a whole: nothing else is written into its folder.
    label = "_".join([*folder.absolute().relative_to(above).parts, *(["best"] if which == "best" else [])])
    return Trained(folder=above, source=source, run=above, label=label)


def _first_member(folder: Path) -> Path | None:
    """Return the best member of an ensemble, whose data and objective all members share."""
    try:
        described = parse_yaml(read_text(folder / "model.yaml", limit=MAX_YAML_BYTES))
        members = expect_map(described, {"made_of": list})["made_of"]
    except (UnreadableError, ValueError):
        return None
    first = Path(str(members[0])) if members else None
    return first if first is not None and (first / "resolved.yaml").is_file() else None


def compose_job(
    trained: Trained,
    overrides: Sequence[str],
    *,
    verb: Verb,
    config_dirs: Sequence[Path] = (),
    packages: Sequence[str] = (),
) -> Composition:
    """Compose and check the config of a job: on one device, unless the command names a strategy.

    Raises:
        ConfigError: a key has no effect on the job, or does not fit.
    """
    _refuse_without_effect(trained, overrides, verb)
    if trained.run is None:
        named = any(key_of(line) == "recipe" for line in overrides)
        composition = compose(
            [*([] if named else ["recipe=null"]), *overrides], config_dirs=config_dirs, packages=packages
        )
    else:
        composition = compose_resumed(trained.run, overrides, config_dirs=config_dirs, packages=packages)
    values = dict(composition.values)
    for group in {key_of(line).removesuffix(f".{TARGET}") for line in overrides if key_of(line).endswith(TARGET)}:
        if group in ("data", "objective"):  # the keys that the run gave to another class
            own = {name for name in values[group] if composition.origin((group, name)).level is Level.command_line}
            values[group] = {name: value for name, value in values[group].items() if name in own}
    values |= {"resume": None, "init_from": None}
    values |= {group: {} for group in ("callbacks", "logger", "cluster", "optimizers")}
    if not any(key_of(line).partition(".")[0] == "strategy" for line in overrides):
        values["strategy"] = {"_target_": "trainkit.strategies.OneDevice", "device": "auto"}
    composition = replace(composition, values=values)
    of_training = "has no effect on a training"
    names = [one for one in check_names(composition) if not (_is_own(one.key, verb) and of_training in one.rule)]
    problems = names or check_values(composition)
    if problems:
        raise ConfigError(problems)
    try:
        refuse_open_workers(composition.cfg)
    except ConfigError as error:
        raise composition.with_origins(error) from error
    return composition


def _is_own(key: str, verb: Verb) -> bool:
    own = _OWN[verb]
    return key == own or key.startswith(f"{own}.")


def _refuse_without_effect(trained: Trained, overrides: Sequence[str], verb: Verb) -> None:
    """Refuse keys that have no effect on a job, and a model without data."""
    keys, problems = {key_of(line): key_of(line).partition(".")[0] for line in overrides}, []
    allowed = (*_KEYS, *(() if trained.run is not None else ("recipe",)))
    reasons = {"model": "the model is the trained one.", "cluster": "it runs on this machine."}
    for key, group in keys.items():
        if group not in allowed and not _is_own(key, verb):
            reason = reasons.get(group, f"it takes {', '.join(_KEYS)} and their keys.")
            problems.append(Problem(key=key, rule=f"has no effect on {verb}: {reason}", origin=COMMAND_LINE))
    if trained.run is None and not {"data", "recipe"} & {*keys.values()}:
        rule = (
            f"the run of {trained.source.path} is not known. Give its data and objective: data=... objective=..., or "
            "recipe=NAME."
        )
        problems.append(Problem(key="data", rule=rule))
    if problems:
        raise ConfigError(problems)


def _problem(path: Path, rule: str) -> Problem:
    return Problem(key=str(path), rule=rule, origin=COMMAND_LINE)


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
        rows = tuple(tuple(math.nan if cell is None else cell for cell in row) for row in table["rows"])
        yield Table(columns=tuple(table["columns"]), rows=rows).markdown()
        if name.endswith(f"/{WORST}"):
            if has_picture:
                yield from ("", "In the order of the table, eight in a row:", "", "![worst](worst.png)")
            yield from _texts(job.dataset, worst)
    yield from ("", *(f"note: {note}" for note in content["notes"]))


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


_RECORD: Final = "prediction.json"
"""File that describes the prediction whose parts a folder holds."""
_MAX_MANIFEST: Final = 64 << 20
_BLOCK: Final = 1 << 20
_NO_SPACE: Final = "Free space there, or name a file on another file system: --out."


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A prediction, complete or interrupted."""

    files: tuple[Path, ...]
    status: str
    """`finished`, or the reason why it stopped."""
    num_rows: int
    num_done: int
    """Number of computed rows; the same command continues after them."""
    num_nonfinite: int = 0
    """Rows of the file that hold NaN or infinity."""


def predict_to_file(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    out: Path,
    split: str | None = None,
    checkpoint: Which = "last",
    overwrite: bool = False,
    config_dirs: Sequence[Path] = (),
    packages: Sequence[str] = (),
    log: Callable[[str], None] = lambda _line: None,
) -> Predicted:
    """Predict every sample of a split, in its order, exactly once, into a file.

    An interrupted prediction leaves `OUT.parts`, and the same call continues it to the same bytes.

    Args:
        path: a run, a checkpoint of one, or a folder or file with a written model.
        overrides: changes of the config: data, strategy, predict.
        out: the file; its ending gives the format.
        split: the split; None: val.
        checkpoint: which checkpoint of a run.
        overwrite: whether to replace an existing file, and to drop the parts of another prediction.
        config_dirs: the user's config folders.
        packages: the user's packages that classes may come from.
        log: logs lines of progress.

    Raises:
        ConfigError: there is no model, the file exists, or a key does not fit.
        CheckpointError: the weights are damaged, or those of another model.
        DataError: the dataset is absent, damaged or empty, or samples have outputs of several shapes.
    """
    _refuse_existing(out, overwrite=overwrite)
    trained = find_trained(path, checkpoint)
    composition = compose_job(trained, overrides, verb="predict", config_dirs=config_dirs, packages=packages)
    cfg = composition.cfg
    folder = out.with_name(f"{out.name}.parts")
    wanted = split_of(cfg, split)
    job = prepare(cfg, JobRequest(verb="predict", split=wanted, source=trained.source, parts=str(folder.absolute())))
    for note in remarks([job.dataset], job.parts.hooks):
        log(f"note: {note}")
    chunks = Chunks(num_rows=size_of(job.dataset), batch_size=cfg.predict.batch_size)
    nonfinite = 0
    with reporting(out.parent), _parts_folder(folder, _identity(trained, job), overwrite=overwrite):
        parts = Parts(folder=folder, chunks=chunks)
        done = set(parts.done())
        todo = [chunk for chunk in range(chunks.count) if chunk not in done]
        if done:
            log(f"continues after {sum(map(chunks.rows_of, done)):,} of {chunks.num_rows:,} rows")
        status = _computed(job, parts, todo, log=log) if todo else "finished"
        finished = status == "finished"
        if finished:
            write_rows(out, parts, partial(ids_of, job.dataset), name=job.outputs.kind)
            blocks = (rows.reshape(len(rows), -1) for rows in parts.contents())
            nonfinite = sum(int((~np.isfinite(rows)).any(-1).sum()) for rows in blocks)
            _remove(folder, parts)
    num_done = chunks.num_rows if finished else parts.num_rows_done()
    return Predicted(
        files=files_of(out), status=status, num_rows=chunks.num_rows, num_done=num_done, num_nonfinite=nonfinite
    )


def _computed(job: Job, parts: Parts, todo: Sequence[int], *, log: Callable[[str], None]) -> str:
    """Compute chunks, and return the status; after an error before the first complete chunk, remove the folder."""
    processes = parts.folder / "processes"
    shutil.rmtree(processes, ignore_errors=True)
    processes.mkdir()
    try:
        result = run_job(replace(job, request=replace(job.request, todo=todo)), processes, log=log)
    except BaseException:
        if not parts.done():  # there is nothing to continue
            _remove(parts.folder, parts)
        raise
    return str(result["status"])


def _refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Refuse a file that exists, and one in a folder that does not."""
    format_of(out)
    found = [] if out.parent.is_dir() else [(out, "its folder does not exist.")]
    for file in existing_files(out):
        if not overwrite:
            found.append((file, "exists already. Give another name, or --overwrite."))
        elif file.is_dir() and not file.is_symlink():
            found.append((file, "is a folder. Give another name."))
    if found:
        raise ConfigError(_of_out(file, rule) for file, rule in found)


def _of_out(file: Path, rule: str) -> Problem:
    return Problem(key="--out", value=str(file), rule=rule, origin=COMMAND_LINE)


def _identity(trained: Trained, job: Job) -> dict[str, Any]:
    """Return everything that decides the bytes of the parts, as JSON."""
    cfg, together = job.cfg, job.strategy.facts_in(PlanContext()).forward_is_collective
    return {
        "version": 1,
        "weights": _hash_of_weights(trained),
        "data": cfg.data,
        "cv": None if cfg.cv.folds is None else [cfg.cv.folds, cfg.cv.fold, cfg.cv.seed],
        "split": job.request.split,
        "num_rows": size_of(job.dataset),
        "objective": cfg.objective,
        "outputs": cfg.predict.outputs,
        "batch_size": cfg.predict.batch_size,
        "threads": cfg.predict.threads,
        "precision": job.parts.precision.value,
        "compile": cfg.compile.mode,
        "device": sorted({task.device.partition(":")[0] for task in job.tasks}),
        # Ranks that compute one forward pass together may round differently from one device.
        "strategy": cfg.strategy if together else None,
        "torch": torch.__version__,
    }


def _hash_of_weights(trained: Trained) -> str:
    """Return a hash of the manifest of a checkpoint, which holds the hashes of its files, or of a written file."""
    if trained.source.checkpoint is not None:
        content = read_bytes(Path(trained.source.checkpoint) / "manifest.json", limit=_MAX_MANIFEST)
        return hashlib.sha256(content).hexdigest()
    found = hashlib.sha256()
    for file in sorted(Path(trained.source.path).glob("**/*.safetensors")):
        with open_regular(file) as opened:
            while block := opened.read(_BLOCK):
                found.update(block)
    return found.hexdigest()


@contextmanager
def _parts_folder(folder: Path, identity: Mapping[str, Any], *, overwrite: bool) -> Iterator[None]:
    """Create the folder of the parts, or continue in it; it is locked for the duration of the block.

    Raises:
        ConfigError: it holds the parts of another prediction, or another process uses it.
    """
    with naming(folder.parent, remedy=_NO_SPACE), suppress(FileExistsError):
        folder.mkdir()
        write_json_atomically(folder / _RECORD, identity)
    try:
        known = read_map(folder / _RECORD, {"version": int, "weights": str})
    except UnreadableError:
        rule = "exists and was not written by a prediction. Rename it, or give another file."
        raise ConfigError([_of_out(folder, rule)]) from None
    with locked(folder / ".lock"):
        differing = [key for key, value in identity.items() if known.get(key) != value]
        if differing and not overwrite:
            there, here = known.get(differing[0]), identity[differing[0]]
            short = isinstance(there, int | str) and len(str(there)) < 40
            both = f", {there} there and {here} here" if short else ""
            rule = (
                f"holds the parts of another prediction, which differs in {', '.join(differing)}{both}. Continue that "
                "one, give another file, or drop its parts by --overwrite."
            )
            raise ConfigError([_of_out(folder, rule)])
        if differing:
            Parts(folder=folder, chunks=Chunks(num_rows=0, batch_size=1)).remove()
            write_json_atomically(folder / _RECORD, identity)
        yield


def _remove(folder: Path, parts: Parts) -> None:
    """Delete what predictions wrote into the folder of the parts, and the folder if nothing else is in it."""
    parts.remove()
    shutil.rmtree(folder / "processes", ignore_errors=True)
    for name in (_RECORD, ".lock"):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


@called_from("python")
def predict(
    model: nn.Module | str | Path,
    dataset: Any,
    *,
    outputs: str = "logits",
    batch_size: int = 64,
    device: str | torch.device | None = None,
    checkpoint: Which = "last",
    packages: Sequence[str] = (),
) -> Tensor:
    """Predict every sample of a dataset, in its order, in this process.

    Args:
        model: a model, or what `trainkit.load` takes.
        dataset: samples with a length, by index or by iteration; targets are not needed.
        outputs: logits, probabilities, classes, or embedding:LAYER.
        batch_size: samples per forward pass.
        device: where to compute; None: where the model is, and the first GPU for a path.
        checkpoint: the checkpoint of a run folder to load.
        packages: your own packages that the classes of a path may come from.

    Returns:
        (samples, ...) on the CPU.

    Raises:
        ConfigError: there is no such model, or `outputs` does not suit it.
        DataError: a sample cannot be read, or samples have outputs of several shapes.

    Example:
        >>> predict(nn.Linear(2, 3), torch.zeros(5, 2)).shape
        torch.Size([5, 3])
    """
    found = predictor(
        model, outputs=outputs, batch_size=batch_size, device=device, checkpoint=checkpoint, packages=packages
    )
    return found(dataset)


def predictor(
    model: nn.Module | str | Path,
    *,
    outputs: str = "logits",
    batch_size: int = 64,
    device: str | torch.device | None = None,
    checkpoint: Which = "last",
    packages: Sequence[str] = (),
) -> Callable[[Any], Tensor]:
    """Load a model once, and return the function that `predict` calls with a dataset; arguments are those of it."""
    refuse_unknown_checkpoint(checkpoint)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError([Problem(key="batch_size", value=batch_size, rule="must be a whole number, 1 or more.")])
    wanted = Outputs.parse(outputs)
    found, objective, precision = _loaded(model, checkpoint, packages, wanted)
    if device is None and found is not model:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device is not None:
        found = found.to(device)
    if problems := wanted.problems(objective, found):
        raise ConfigError(problems)
    place = next((one.device for one in found.parameters()), torch.device("cpu"))
    use_device(place)
    if found is not model:  # by default torch rounds the products of a convolution to ten bits
        precision.apply_globally(place.type)
    local = LocalModel(model=found, device=place, data_ranks=LocalCollective(), precision=precision)
    return lambda dataset: torch.cat(list(_rows(local, objective, wanted, dataset, batch_size)))


def _loaded(
    model: nn.Module | str | Path, checkpoint: Which, packages: Sequence[str], outputs: Outputs
) -> tuple[nn.Module, Objective, Precision]:
    """Return a model, and the objective and precision of the run that a path names."""
    if isinstance(model, nn.Module):
        return model, _AnyInputs(outputs), Precision()
    path = Path(model).expanduser()
    loaded = load_model(path, checkpoint=checkpoint, packages=packages)
    if not (path / "resolved.yaml").is_file():
        return loaded, _AnyInputs(outputs), Precision()
    with allow_packages(packages):
        cfg = run_config(path)
        precision: Precision = build(cfg.precision, "precision")
        return precision.adapt(loaded), build_objective(cfg), precision


def _rows(local: LocalModel, objective: Objective, outputs: Outputs, dataset: Any, batch_size: int) -> Iterator[Tensor]:
    """Yield the rows of one batch after another, on the CPU.

    Raises:
        DataError: samples have outputs of several shapes.
    """
    chunks = Chunks(num_rows=size_of(dataset), batch_size=batch_size)
    starts = list(range(0, chunks.num_rows, batch_size))
    reading = Reading(device=local.device, settings=LoaderConfig())
    batches = EvalBatches(dataset, reading, batch_size=batch_size, rank=0, num_ranks=1, starts=starts)
    shape: torch.Size | None = None
    found = predicted(local, objective, outputs, batches, chunks=chunks, starts=starts)
    for start, rows in zip(starts, found, strict=True):
        shape = rows.shape[1:] if shape is None else shape
        if rows.shape[1:] != shape:
            raise uneven_rows(shape, rows.shape[1:], start)
        yield rows.cpu()


class _AnyInputs(Supervised):
    """Takes the input of a sample by its common names."""

    log_scores = True

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs

    def predict(self, model: Model, batch: Any) -> Any:
        """Run the model.

        Raises:
            ConfigError: the dim of the classes is needed, and not known.
        """
        found = super().predict(model, batch)
        if self._outputs.kind in ("probabilities", "classes") and found.dim() > 2:
            rule = (
                f"needs to know which dim has the classes, and the model alone, without its objective, gives "
                f"{tuple(found.shape)}. Predict from the folder of its run, or take logits."
            )
            raise ConfigError([Problem(key="outputs", value=self._outputs.kind, rule=rule)])
        return found

    def score(self, outputs: Any, targets: Any) -> Loss:
        """Raise an error: nothing is scored."""
        raise NotImplementedError
