"""The weights that a training starts from: those of a checkpoint, or of a safetensors file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.errors import CheckpointError, ConfigError, Problem
from trainkit.fields import Reads
from trainkit.files import open_regular
from trainkit.strategies.tensor_shards import model_weights
from trainkit.trained.build import meta_model
from trainkit.trained.model import WEIGHTS, FileWeights
from trainkit.trainer.checkpoint.tensors import Loaded, load, newest_valid
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
        return FileWeights.of(file, meta_model(cfg))
    return model_weights(load_checkpoint(path, report=report).tensors)


def refuse_absent_weights(cfg: RunConfig) -> None:
    """Refuse a path of `init_from` without weights, before anything starts; loads no weights.

    Raises:
        ConfigError: it names something else than a checkpoint or a safetensors file.
        CheckpointError: the safetensors file is damaged, or has two tensors for one of the model.
    """
    path = _named(cfg)
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
    what = next((text for first, text in _BEGINNINGS.items() if begin.startswith(first)), None)
    if what is None:
        return f"is no safetensors file: it begins with {begin[:8]!r}."
    code = (
        f"import torch; from safetensors.torch import save_file; "
        f"found = torch.load({str(file)!r}, map_location='cpu', weights_only=True); "
        f"found = found.get('state_dict', found); "
        f"save_file({{name: tensor.clone() for name, tensor in found.items()}}, {f'{file}.safetensors'!r})"
    )
    convert = f" Convert it: python -c {shlex.quote(code)}" if "torch.save" in what else ""
    return f"is {what}, and a safetensors file is needed: trainkit unpickles nothing.{convert}"


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
