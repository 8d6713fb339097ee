"""Whole runs of the zoo: as `trainkit.train`, without the job of Hydra, which takes half of the time of a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

import trainkit
from tests.support.settings import latest
from trainkit.config.check import checked
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError
from trainkit.run.begin import RunRequest
from trainkit.run.runner import train
from trainkit.trainer.checkpoint.tensors import load

CONF = Path(__file__).resolve().parents[1] / "support" / "conf"
QUIET = ("recipe=null", "callbacks=[]", "logger=[]", "seed=3", "precision=fp64")


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    """Train in a folder; what result.json holds."""
    with allow_packages(["tests"]):
        config = checked(trainkit.compose(latest(*QUIET, *overrides), config_dirs=[CONF], packages=["tests"]))
        try:
            return train(RunRequest(cfg=config.cfg, run_dir=folder, notes=config.notes, is_given=config.is_given))
        except ConfigError as error:
            raise config.with_origins(error) from error


def weights(result: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters and buffers of the last checkpoint, by name."""
    tensors = load(Path(result["last"])).tensors
    kinds = ("param", "buffer")
    return {name: t for key, t in tensors.items() for kind, _, name in [key.partition("/")] if kind in kinds}
