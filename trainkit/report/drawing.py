"""Plots are drawn by a short-lived process of their own: `python -m trainkit.report.drawing`, a request on its input.

In the training process matplotlib costs 28 MB and 0.3 s of its time for as long as the run goes; beside it, it costs
another core half a second, and a plot that fails cannot hurt the training.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainkit.reading import read_lines

__all__ = ["Drawing", "lr_request", "metrics_request", "sweep_request"]


def lr_request(path: Path, *, title: str, points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Ask for the plot of the learning rate."""
    return {"draw": "lr", "path": str(path), "title": title, "points": [list(point) for point in points]}


def metrics_request(folder: Path, *, title: str, metrics: Path, modes: Mapping[str, str]) -> dict[str, Any]:
    """Ask for a plot of every metric that `metrics.jsonl` holds: `loss.png`, `accuracy.png` ..."""
    return {"draw": "metrics", "folder": str(folder), "title": title, "metrics": str(metrics), "modes": dict(modes)}


def sweep_request(
    path: Path, *, title: str, metric: str, mode: str, jobs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Ask for the plot of a sweep: its jobs with their settings and figures, best first."""
    listed = [dict(job) for job in jobs]
    return {"draw": "sweep", "path": str(path), "title": title, "metric": metric, "mode": mode, "jobs": listed}


class Drawing:
    """One plot on its way."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """Start drawing; returns at once."""
        # Without the launcher's variables: a plot is no rank of anything. No GPU is looked for either.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "trainkit.report.drawing", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the training in good order; its plots are part of that
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request))
        self._process.stdin.close()

    @property
    def running(self) -> bool:
        """Whether the plot is still being drawn."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> str:
        """Wait for the plot.

        Returns:
            Why there is none, or an empty text.
        """
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                return f"not drawn within {timeout_s:g} s"
            lines = errors.read().strip().splitlines()
        return "" if self._process.returncode == 0 else (lines[-1] if lines else f"exit {self._process.returncode}")


def draw(request: Mapping[str, Any]) -> None:
    """Draw what a request asks for, here and now."""
    from trainkit.report import curves  # noqa: PLC0415 - imports matplotlib: for this process only

    match request["draw"]:
        case "lr":
            curves.draw_lr(Path(request["path"]), title=request["title"], points=request["points"])
        case "metrics":
            read = curves.read_curves(read_lines(Path(request["metrics"])))
            curves.draw_metrics(Path(request["folder"]), title=request["title"], curves=read, modes=request["modes"])
        case "sweep":
            from trainkit.report import sweep_plot  # noqa: PLC0415 - the same

            told = {name: request[name] for name in ("title", "metric", "mode", "jobs")}
            sweep_plot.draw_sweep(Path(request["path"]), **told)


def _serve(stream: TextIO, parent: int) -> None:
    _die_with(parent)
    os.nice(10)  # training goes first
    draw(json.load(stream))


def _die_with(parent: int) -> None:
    """End when the training process does (Linux): a killed run leaves nothing behind."""
    if sys.platform != "linux":
        return
    import ctypes  # noqa: PLC0415 - this process only
    import signal  # noqa: PLC0415

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)  # it died before we asked


if __name__ == "__main__":
    _serve(sys.stdin, int(sys.argv[1]))
