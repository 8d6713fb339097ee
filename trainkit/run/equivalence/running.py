"""Train a few steps at one common cut, and read the weights after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, DataError
from trainkit.run.runner import train
from trainkit.trainer.checkpoint import list_complete, load

Weights = Mapping[int, Mapping[str, Tensor]]
"""Updates -> `param/...` or `buffer/...` -> tensor."""

_PRECISION: Final = "trainkit.numerics.precision.Precision"


def bare(cfg: RunConfig, steps: int) -> RunConfig:
    """Return the config with a checkpoint after every step, and without evaluation, callbacks and loggers."""
    return replace(
        cfg,
        stop_at_step=steps,
        resume=None,
        quiet=True,
        callbacks={},
        logger={},
        log_every_steps=1,
        eval=replace(cfg.eval, every_steps=None, every_epochs=None),
        checkpoint=replace(
            cfg.checkpoint, every_steps=1, every_epochs=None, keep_last=1 << 30, keep_best=0, background=False
        ),
    )


def with_precision(cfg: RunConfig, value: str) -> RunConfig:
    """Return the config with another precision."""
    return replace(cfg, precision={"_target_": _PRECISION, "value": value})


def reference_weights(
    cfg: RunConfig, folder: Path, log: Callable[[str], None]
) -> tuple[str, dict[int, dict[str, Tensor]]]:
    """Train the reference in fp64, or in fp32 if the model does not run in fp64.

    Returns:
        The precision that was used, and the weights after every step.
    """
    try:
        log("reference: one_device in fp64")
        return "fp64", weights_by_step(with_precision(cfg, "fp64"), folder / "reference_fp64")
    except (ConfigError, DataError):
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        log(f"the model does not run in fp64 ({str(error).splitlines()[0]}); reference: one_device in fp32")
        return "fp32", weights_by_step(with_precision(cfg, "fp32"), folder / "reference_fp32")


def last_weights(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Return the weights in the last checkpoint of a run folder, by its step."""
    last = max(list_complete(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step)
    return {last.step: _weights(load(last.folder).tensors)}


def weights_by_step(cfg: RunConfig, folder: Path) -> dict[int, dict[str, Tensor]]:
    """Train in a folder, and return the weights after every step that has a checkpoint."""
    train(cfg, run_dir=folder)
    found = sorted(list_complete(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step)
    return {one.step: _weights(load(one.folder).tensors) for one in found}


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer/")}
