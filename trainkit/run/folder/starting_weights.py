"""The weights that a training starts from: those of a checkpoint, or of a safetensors file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.errors import CheckpointError
from trainkit.exporting.whole_file import WEIGHTS, FileWeights
from trainkit.run.planning.memory import model_without_data
from trainkit.strategies.tensors.lazy_state import model_weights
from trainkit.trainer.checkpoint import Loaded, load, newest_valid
from trainkit.trainer.manifest import MANIFEST, list_complete


def starting_weights(cfg: RunConfig, *, report: Callable[[str], None]) -> Mapping[str, Tensor]:
    """Return the weights that `init_from` names, by their names in a checkpoint; read on access.

    It names a safetensors file, the folder `model` of a run, a run, a `checkpoints` folder or one checkpoint.

    Args:
        cfg: the config; its model gives the names of parameters and buffers.
        report: receives a line about each damaged checkpoint and its replacement.

    Raises:
        CheckpointError: there are no weights, or they are damaged.
    """
    path = _named(cfg)
    if (file := _file_of(path)).is_file():
        return FileWeights.of(file, model_without_data(cfg))
    return model_weights(load_checkpoint(path, report=report).tensors)


def refuse_absent_weights(cfg: RunConfig) -> None:
    """Refuse a path of `init_from` without weights, before anything starts; reads no weights.

    Raises:
        CheckpointError: there are no weights, or the file is no safetensors file.
    """
    path = _named(cfg)
    if (file := _file_of(path)).is_file():
        FileWeights.of(file, model_without_data(cfg))
    elif not (path / MANIFEST).is_file() and not list_complete(_root_of(path)):
        raise CheckpointError(f"{path} holds no checkpoint.")


def _file_of(path: Path) -> Path:
    return (path / WEIGHTS).resolve() if (path / WEIGHTS).is_file() else path


def _named(cfg: RunConfig) -> Path:
    # The user named it: a link to it is followed. `resolve` raises for one to itself before Python 3.13.
    return Path(os.path.realpath(Path(str(cfg.init_from)).expanduser()))


def _root_of(path: Path) -> Path:
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def load_checkpoint(
    path: Path, *, report: Callable[[str], None], check: Callable[[Loaded], None] = lambda _: None
) -> Loaded:
    """Load a checkpoint folder, or the newest complete one of a run or `checkpoints` folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if (path / MANIFEST).is_file():
        loaded = load(path)
        check(loaded)
        return loaded
    found = newest_valid(_root_of(path), report=report, check=check)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint.")
    return found
