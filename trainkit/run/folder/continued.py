"""What a new run takes of another one: checkpoints and rows of the steps before, or the weights it starts from."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from trainkit.callbacks.every_run import keep_until
from trainkit.callbacks.histograms import FILE as HISTOGRAMS
from trainkit.config.schema import RunConfig
from trainkit.errors import CheckpointError, ConfigError, Problem
from trainkit.fields import Reads
from trainkit.files import naming, open_regular, refuse_link
from trainkit.run.folder.run_folder import RunFolder
from trainkit.strategies.tensor_shards import model_weights
from trainkit.trained.build import meta_model
from trainkit.trained.model import WEIGHTS, FileWeights
from trainkit.trainer.checkpoint.saving import adopt_checkpoint
from trainkit.trainer.checkpoint.tensors import load, newest_valid
from trainkit.trainer.manifest import MANIFEST, EvaluatedIndex, Retention, list_complete

_ROWS: Final = ("metrics.jsonl", "tables.jsonl", "evaluations.jsonl", HISTOGRAMS)
"""Files of a run with a line for each step or evaluation."""


def bring_earlier_steps(folder: RunFolder, source: Path, retention: Retention) -> str:
    """Bring the steps before a checkpoint into a new run folder, so that the run there is the whole training.

    These are the checkpoints that the new run would keep (the one that it starts from, those before it, and the best),
    the rows of its metrics and tables, and the events of TensorBoard. The other folder does not change, and is not
    needed afterwards.

    Args:
        folder: the new run folder, which has its token.
        source: the `checkpoints` folder of the other run, or one checkpoint in it.
        retention: the rule of the new run.

    Returns:
        A line about the start.

    Raises:
        CheckpointError: there is no checkpoint, or the named one is damaged.
        UnreadableError: a file of the other run is not a regular file.
        StorageError: a file cannot be written.
    """
    if (source / MANIFEST).is_file():
        root, start = source.parent, [load(source).checkpoint]
    else:
        root, start = source, list_complete(source)[:1]
    if not start:
        raise CheckpointError(f"{source} holds no checkpoint.")
    step, index, owner = start[0].step, EvaluatedIndex.read(root), folder.take()
    earlier = [checkpoint for checkpoint in list_complete(root) if checkpoint.step < step]
    candidates = [*map(index.of, [*start, *earlier])]
    kept = [*candidates[: retention.keep_last], *retention.ranked(candidates)[: retention.keep_best]]
    by_folder = {checkpoint.folder: checkpoint for checkpoint in kept}
    for checkpoint in sorted(by_folder.values(), key=lambda checkpoint: checkpoint.step):
        adopt_checkpoint(checkpoint, folder.checkpoints, owner)
    retention.apply(folder.checkpoints, step=step, owner=owner)  # this names the last and the best
    for name in _ROWS:
        keep_until(folder.path / name, step, source=root.parent / name)
    events = root.parent / "tensorboard"
    for file in sorted([*events.glob("events.out.tfevents.*"), *events.glob("*/events.out.tfevents.*")]):
        if file.name.endswith(".hparams"):  # the settings of a job of a sweep
            continue
        for parent in {events, file.parent}:
            refuse_link(parent)
        copy = folder.tensorboard / file.relative_to(events)
        with naming(copy), open_regular(file) as old:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(copy, "wb") as new:
                shutil.copyfileobj(old, new)
    return (
        f"resume: starts at step {step:,} of {root.parent}; its checkpoints, rows and TensorBoard "
        "events up to there are part of this folder"
    )


def starting_weights(cfg: RunConfig, *, report: Callable[[str], None]) -> Mapping[str, Tensor]:
    """Return the weights that `init_from` names, by their names in a checkpoint; read on access.

    It names a safetensors file, the folder `model` of a run, a run, a `checkpoints` folder or one checkpoint.

    Args:
        cfg: the config; its model gives the names of parameters and buffers.
        report: receives a line about each damaged checkpoint and its replacement.

    Raises:
        CheckpointError: there are no weights, or they are damaged.
    """
    path = _path_of(cfg)
    if (file := _file_of(path)).is_file():
        return FileWeights.of(file, meta_model(cfg))
    loaded = load(path) if (path / MANIFEST).is_file() else newest_valid(_root_of(path), report)
    if loaded is None:
        raise CheckpointError(f"{path} holds no checkpoint.")
    return model_weights(loaded.tensors)


def refuse_absent_weights(cfg: RunConfig) -> None:
    """Refuse a path of `init_from` without weights, before anything starts; loads no weights.

    Raises:
        ConfigError: it names something else than a checkpoint or a safetensors file.
        CheckpointError: the safetensors file is damaged, or has two tensors for one of the model.
    """
    path = _path_of(cfg)
    is_file = (file := _file_of(path)).is_file()
    if is_file:
        rule = _other_format(file)
    elif (path / MANIFEST).is_file() or list_complete(_root_of(path)):
        rule = None
    else:
        rule = (
            Reads().rule(path)
            or f"holds neither a checkpoint nor {WEIGHTS}. Name a run, a checkpoint, or a safetensors file."
        )
    if rule is not None:
        raise ConfigError([Problem(key="init_from", value=cfg.init_from, rule=rule)])
    if is_file:
        FileWeights.of(file, meta_model(cfg))


_BEGINNINGS: Final = {
    b"PK\x03\x04": "a zip archive, as torch.save writes pickles",
    b"\x80": "a pickle, as torch.save wrote it before torch 1.6",
    b"\x89HDF": "an HDF5 file, as Keras writes it",
    b"GGUF": "a GGUF file",
    b"{": "a JSON file, such as the index of a model in several files",
    b"version https://git-lfs": "the pointer of Git LFS to a file that was not fetched: git lfs pull fetches it",
}
"""First bytes of files that are often taken for weights -> what they are."""


def _other_format(file: Path) -> str | None:
    """Return what a file is by its first bytes, and how to convert it; None for what may be a safetensors file."""
    with open_regular(file) as opened:
        begin = opened.read(24)
    if begin[8:9] == b"{":  # the header of a safetensors file, after its length
        return None
    kind = next((text for first, text in _BEGINNINGS.items() if begin.startswith(first)), None)
    if kind is None:
        return f"is no safetensors file: it begins with {begin[:8]!r}."
    code = (
        f"import torch; from safetensors.torch import save_file; "
        f"found = torch.load({str(file)!r}, map_location='cpu', weights_only=True); "
        f"found = found.get('state_dict', found); "
        f"save_file({{name: tensor.clone() for name, tensor in found.items()}}, {f'{file}.safetensors'!r})"
    )
    convert = f" Convert it: python -c {shlex.quote(code)}" if "torch.save" in kind else ""
    return f"is {kind}, and a safetensors file is needed: trainkit unpickles nothing.{convert}"


def _file_of(path: Path) -> Path:
    return (path / WEIGHTS).resolve() if (path / WEIGHTS).is_file() else path


def _path_of(cfg: RunConfig) -> Path:
    # The user named it: a link to it is followed. `resolve` raises for one to itself before Python 3.13.
    return Path(os.path.realpath(Path(str(cfg.init_from)).expanduser()))


def _root_of(path: Path) -> Path:
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path
