"""Show the result of a training: its figures, its best checkpoint, its model."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from trainkit.api.objects import Given, registered
from trainkit.files import read_bytes
from trainkit.report.numbers import figure
from trainkit.run.folder.model_file import load_model

if TYPE_CHECKING:
    from torch import nn


_MOST: Final = 6
"""Number of plots shown in a notebook."""


class TrainingResult(dict[str, Any]):
    """The content of `result.json`, and `folder`, the run folder.

    Example:
        >>> TrainingResult({"metrics": {"val/loss": 0.5}, "folder": "run"}).metrics["val/loss"]
        0.5
    """

    def __init__(self, content: Mapping[str, Any], *, given: Given | None = None, packages: Sequence[str] = ()) -> None:
        super().__init__(content)
        self._given = given or Given()
        self._packages = packages

    def __reduce__(self) -> tuple[type[TrainingResult], tuple[dict[str, Any]]]:
        """Pickle the content alone: objects of this process stay here."""
        return TrainingResult, (dict(self),)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self["folder"])

    @property
    def metrics(self) -> dict[str, float]:
        """Name -> last value, `val/accuracy` ..."""
        return dict(self.get("metrics") or {})

    @property
    def best(self) -> Path | None:
        """The best checkpoint by `eval.metric`; None if nothing was evaluated."""
        return Path(self["best"]) if self.get("best") else None

    def model(self, checkpoint: Literal["best", "last"] | None = None) -> nn.Module:
        """Return the trained model on the CPU, in evaluation mode.

        Args:
            checkpoint: which checkpoint; None: the best, or the last where nothing was evaluated.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        which = checkpoint or ("last" if self.best is None else "best")
        with registered(self._given):
            return load_model(self.folder, checkpoint=which, packages=self._packages)

    def _repr_html_(self) -> str:
        """Return a table of the figures, and the curves, for a notebook."""
        rows = {"status": self.get("status"), "steps": self.get("steps"), "folder": self["folder"]}
        rows |= {name: figure(value) for name, value in self.metrics.items()}
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in rows.items()
        )
        plots = sorted((self.folder / "plots").glob("*.png"))[:_MOST]
        images = "".join(
            f"<img alt='{html.escape(plot.stem)}' style='max-width:32em' "
            f"src='data:image/png;base64,{base64.b64encode(read_bytes(plot)).decode()}'>"
            for plot in plots
        )
        return f"<table>{cells}</table><div>{images}</div>"
