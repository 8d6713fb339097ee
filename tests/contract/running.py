"""Whole runs of the zoo, by the public Python path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

import trainkit
from tests.support.settings import latest
from trainkit.trainer.checkpoint.tensors import load

CONF = Path(__file__).resolve().parents[1] / "support" / "conf"
QUIET = ("recipe=null", "callbacks=[]", "logger=[]", "seed=3", "precision=fp64")


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    """Train in a folder; what result.json holds."""
    composition = trainkit.compose(latest(*QUIET, *overrides), config_dirs=[CONF], packages=["tests"])
    return trainkit.train(composition, run_dir=folder)


def weights(result: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters and buffers of the last checkpoint, by name."""
    tensors = load(Path(result["last"])).tensors
    kept = ("param", "buffer")
    return {name: t for key, t in tensors.items() for kind, _, name in [key.partition("/")] if kind in kept}
