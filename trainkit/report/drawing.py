"""Draw plots in a short-lived process: `python -m trainkit.report.drawing`, with a request on its standard input.

In the training process, matplotlib would take 28 MB and 0.3 s for the whole run; in a separate process it occupies
another core for half a second, and a plot that fails cannot affect the training.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainkit.files import read_lines


def lr_request(path: Path, *, title: str, rates: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Return the request for the plot of the learning rate: name of an optimizer -> pairs of step and rate."""
    listed = {name: [list(point) for point in points] for name, points in rates.items()}
    return {"draw": "lr", "path": str(path), "title": title, "rates": listed}


def metrics_request(folder: Path, *, title: str, metrics: Path, modes: Mapping[str, str]) -> dict[str, Any]:
    """Return the request for a plot of every metric in `metrics.jsonl`: `loss.png`, `accuracy.png` ..."""
    return {"draw": "metrics", "folder": str(folder), "title": title, "metrics": str(metrics), "modes": dict(modes)}


def sweep_request(
    path: Path, *, title: str, metric: str, mode: str, jobs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the request for the plot of a sweep: its jobs with their settings and metrics, best first."""
    listed = [dict(job) for job in jobs]
    return {"draw": "sweep", "path": str(path), "title": title, "metric": metric, "mode": mode, "jobs": listed}


def bench_request(path: Path, *, title: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the request for the plot of a measurement: its choices, as in bench.json."""
    return {"draw": "bench", "path": str(path), "title": title, "choices": [dict(one) for one in choices]}


def range_request(path: Path, *, title: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for the plot of a range test: its steps and suggestions, as in find_lr.json."""
    kept = {name: content[name] for name in ("points", "steepest", "tenth_of_minimum")}
    return {"draw": "range", "path": str(path), "title": title, **kept}


def scale_request(path: Path, *, title: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for the plot of more replicas: predictions, checks and knee, as in scale.json."""
    kept = {name: content[name] for name in ("predictions", "checks", "knee")}
    return {"draw": "scale", "path": str(path), "title": title, **kept}


def histograms_request(folder: Path, *, title: str, records: Path) -> dict[str, Any]:
    """Return the request for a plot of each kind in `histograms.jsonl`: `gradients.png`, `weights.png` ..."""
    return {"draw": "histograms", "folder": str(folder), "title": title, "records": str(records)}


def confusion_request(path: Path, *, title: str, classes: Sequence[str], counts: Any) -> dict[str, Any]:
    """Return the request for the plot of a confusion matrix: a row of counts for each true class."""
    return {"draw": "confusion", "path": str(path), "title": title, "classes": list(classes), "counts": counts}


def samples_request(path: Path, *, title: str, samples: Sequence[tuple[bytes, Sequence[str]]]) -> dict[str, Any]:
    """Return the request for a plot of images, each a PNG with the lines of its caption."""
    listed = [{"png": base64.b64encode(png).decode(), "caption": list(lines)} for png, lines in samples]
    return {"draw": "samples", "path": str(path), "title": title, "samples": listed}


class Drawing:
    """One plot in progress."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """Start drawing; returns at once."""
        # Without the launcher's variables: a plot is not a rank. No GPU is searched for either.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "trainkit.report.drawing", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the training regularly, and its plots are part of that
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
            The reason why there is no plot, or an empty text.
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
    """Draw the plot of a request, in this process."""
    from trainkit.report import curves  # noqa: PLC0415 - imports matplotlib: for this process only

    match request["draw"]:
        case "lr":
            curves.draw_lr(Path(request["path"]), title=request["title"], rates=request["rates"])
        case "metrics":
            read = curves.read_curves(read_lines(Path(request["metrics"])))
            curves.draw_metrics(Path(request["folder"]), title=request["title"], curves=read, modes=request["modes"])
        case "bench":
            from trainkit.report import measured_plots  # noqa: PLC0415 - the same

            measured_plots.draw_bench(Path(request["path"]), title=request["title"], choices=request["choices"])
        case "range":
            from trainkit.report import measured_plots  # noqa: PLC0415 - the same

            fields = {name: request[name] for name in ("title", "points", "steepest", "tenth_of_minimum")}
            measured_plots.draw_range(Path(request["path"]), **fields)
        case "scale":
            from trainkit.report import measured_plots  # noqa: PLC0415 - the same

            fields = {name: request[name] for name in ("title", "predictions", "checks", "knee")}
            measured_plots.draw_scale(Path(request["path"]), **fields)
        case "sweep":
            from trainkit.report import sweep_plot  # noqa: PLC0415 - the same

            fields = {name: request[name] for name in ("title", "metric", "mode", "jobs")}
            sweep_plot.draw_sweep(Path(request["path"]), **fields)
        case "histograms":
            from trainkit.report import histogram_plot  # noqa: PLC0415 - the same

            lines = read_lines(Path(request["records"]))
            histogram_plot.draw_histograms(Path(request["folder"]), title=request["title"], lines=lines)
        case "confusion":
            from trainkit.report import class_plots  # noqa: PLC0415 - the same

            fields = {name: request[name] for name in ("title", "classes", "counts")}
            class_plots.draw_confusion(Path(request["path"]), **fields)
        case "samples":
            from trainkit.report import class_plots  # noqa: PLC0415 - the same

            pictures = [(base64.b64decode(one["png"]), one["caption"]) for one in request["samples"]]
            class_plots.draw_samples(Path(request["path"]), title=request["title"], samples=pictures)


def _main(stream: TextIO, parent: int) -> None:
    _die_with(parent)
    os.nice(10)  # lower priority than the training
    draw(json.load(stream))


def _die_with(parent: int) -> None:
    """End together with the training process (Linux), so that a killed run leaves no process."""
    if sys.platform != "linux":
        return
    import ctypes  # noqa: PLC0415 - this process only
    import signal  # noqa: PLC0415

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)  # the parent died before the call


if __name__ == "__main__":
    _main(sys.stdin, int(sys.argv[1]))
