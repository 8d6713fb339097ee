"""Predict with a trained model: to a file by any number of processes, or to a tensor in this one."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainkit.api.trained import Trained, Which, compose_job, find_trained
from trainkit.cluster.host import use_device
from trainkit.config.door import called_from
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.identity import run_config
from trainkit.config.sections import LoaderConfig
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.targets.build import build
from trainkit.data.hooks import Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.remarks import remarks
from trainkit.data.splits import size_of
from trainkit.errors import ConfigError, Problem, UnreadableError
from trainkit.files import open_regular, read_bytes, read_map, write_json_atomically
from trainkit.inference.outputs import Outputs
from trainkit.inference.parts import Chunks, Parts, uneven_rows
from trainkit.inference.predicting import predicted
from trainkit.inference.writing import existing_files, files_of, format_of, ids_of, write_rows
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Loss, Model, Objective, Supervised
from trainkit.run.folder.model_file import load_model, refuse_unknown_checkpoint
from trainkit.run.inference.job import Job, prepare, split_of
from trainkit.run.inference.launch import run_job
from trainkit.run.inference.request import JobRequest
from trainkit.run.planning.build import build_objective
from trainkit.storage import naming, reporting
from trainkit.strategies.base import LocalModel, PlanContext
from trainkit.strategies.collectives import LocalCollective
from trainkit.trainer.ownership import locked

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
            nonfinite = sum(_num_nonfinite(rows) for rows in parts.contents())
            _remove(folder, parts)
    num_done = chunks.num_rows if finished else parts.num_rows_done()
    return Predicted(
        files=files_of(out), status=status, num_rows=chunks.num_rows, num_done=num_done, num_nonfinite=nonfinite
    )


def _num_nonfinite(rows: NDArray[Any]) -> int:
    """Return the number of rows with NaN or infinity.

    Example:
        >>> _num_nonfinite(np.array([[0.0, np.nan], [1.0, 2.0]]))
        1
    """
    return int((~np.isfinite(rows.reshape(len(rows), -1))).any(-1).sum())


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
    problems = []
    if not out.parent.is_dir():
        problems.append(Problem(key="--out", value=str(out), rule="its folder does not exist.", origin=COMMAND_LINE))
    if not overwrite:
        rule = "exists already. Give another name, or --overwrite."
        problems += [
            Problem(key="--out", value=str(file), rule=rule, origin=COMMAND_LINE) for file in existing_files(out)
        ]
    else:
        rule = "is a folder. Give another name."
        problems += [
            Problem(key="--out", value=str(file), rule=rule, origin=COMMAND_LINE)
            for file in existing_files(out)
            if file.is_dir() and not file.is_symlink()
        ]
    if problems:
        raise ConfigError(problems)


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
        raise ConfigError([Problem(key="--out", value=str(folder), rule=rule, origin=COMMAND_LINE)]) from None
    with locked(folder / ".lock"):
        differing = [key for key, value in identity.items() if known.get(key) != value]
        if differing and not overwrite:
            key = differing[0]
            both = f", {known.get(key)} there and {identity[key]} here" if _is_short(known.get(key)) else ""
            rule = (
                f"holds the parts of another prediction, which differs in {', '.join(differing)}{both}. Continue that "
                "one, give another file, or drop its parts by --overwrite."
            )
            raise ConfigError([Problem(key="--out", value=str(folder), rule=rule, origin=COMMAND_LINE)])
        if differing:
            Parts(folder=folder, chunks=Chunks(num_rows=0, batch_size=1)).remove()
            write_json_atomically(folder / _RECORD, identity)
        yield


def _is_short(value: object) -> bool:
    return isinstance(value, int | str) and len(str(value)) < 40


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
    return torch.cat(list(_rows(local, objective, wanted, dataset, batch_size)))


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
