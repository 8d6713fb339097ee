"""Draw plots in a short-lived process: `python -m trainkit.report.drawing`, with the requests on its standard input.

In the training process, matplotlib would take 28 MB and 0.3 s for the whole run; in a separate process it occupies
another core for half a second, and a plot that fails cannot affect the training.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TextIO

from trainkit.files import read_lines

_MODULES: Final = {"lr": "curves", "metrics": "curves", "sweep": "sweep_plot"}
"""Plot -> the module with its function `draw_PLOT`; all others are in `plots`."""


class Drawing:
    """Plots in progress, one after the other in one process.

    A request has the name of its plot under `draw`, and the arguments of the plot's function: `path` or `folder` for
    what is written, `title`, and its data; `records` is a file whose lines become the argument `lines`.
    """

    def __init__(self, *requests: Mapping[str, Any]) -> None:
        """Start drawing; returns at once."""
        # Without the launcher's variables: a plot is not a rank. No GPU is searched for either.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "trainkit.report.drawing", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the training regularly, and its plots are part of that
            text=True,
        )
        self._num_requests = len(requests)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests, default=_plain))
        self._process.stdin.close()

    @property
    def running(self) -> bool:
        """Whether a plot is still being drawn."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> list[str]:
        """Wait for the plots.

        Returns:
            For each the reason why there is none, or an empty text.
        """
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            missing = "it was not drawn"
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                missing = f"not drawn within {timeout_s:g} s"
            found = [json.loads(line) for line in answers]
        return [*found, *[missing] * (self._num_requests - len(found))]


def _plain(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def draw(requests: Iterable[Mapping[str, Any]], answers: TextIO) -> None:
    """Draw plots in this process; write a line of JSON for each: why there is none, or an empty text."""
    for request in requests:
        given, reason = dict(request), ""
        kind = given.pop("draw")
        given.update({name: Path(given[name]) for name in ("path", "folder") if name in given})
        try:
            if "records" in given:
                given["lines"] = list(read_lines(Path(given.pop("records"))))
            getattr(import_module(f"trainkit.report.{_MODULES.get(kind, 'plots')}"), f"draw_{kind}")(**given)
        except Exception as error:  # noqa: BLE001 - the other plots are drawn
            reason = traceback.format_exception_only(error)[-1].strip()
        answers.write(f"{json.dumps(reason)}\n")
        answers.flush()


def _main(stream: TextIO, parent: int) -> None:
    _die_with(parent)
    os.nice(10)  # lower priority than the training
    draw(json.load(stream), sys.stdout)


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
