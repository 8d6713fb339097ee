"""The weights that a training starts from: those of a checkpoint, or of a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.errors import CheckpointError
from trainkit.exporting.whole_file import WEIGHTS, FileWeights
from trainkit.run.planning.memory import model_without_data
from trainkit.strategies.tensors.lazy_state import model_weights
from trainkit.trainer.checkpoint import Loaded, load, newest_valid
from trainkit.trainer.manifest import MANIFEST


def starting_weights(cfg: RunConfig, *, report: Callable[[str], None]) -> Mapping[str, Tensor]:
    """Return the weights that `init_from` names, by their names in a checkpoint; read on access.

    It names a safetensors file, the folder `model` of a run, a run, a `checkpoints` folder or one checkpoint.

    Args:
        cfg: the config; its model gives the names of parameters and buffers.
        report: receives a line about each damaged checkpoint and its replacement.

    Raises:
        CheckpointError: there are no weights, or they are damaged.
    """
    path = Path(str(cfg.init_from)).expanduser().resolve()  # the user named it: a link to it is followed
    file = path / WEIGHTS if (path / WEIGHTS).is_file() else path
    if file.is_file():
        return FileWeights.of(file.resolve(), model_without_data(cfg))
    return model_weights(load_checkpoint(path, report=report).tensors)


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
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = newest_valid(root, report=report, check=check)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint.")
    return found
