"""The loggers that send a run to a tracker."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from trainkit.errors import MissingExtraError, TrainkitError
from trainkit.fields import above, cosmetic
from trainkit.files import parse_json
from trainkit.tracking.sending import ANSWERS, ASKS, END, TROUBLE, with_rest
from trainkit.tracking.state import TrackingState, begun_state, read_state, write_state
from trainkit.trainer.events import Callback, Row, Run

_log = logging.getLogger(__name__)
_CHUNK: Final = 1 << 16


class Courier:
    """The process that sends a run folder to a tracker, seen from the training."""

    def __init__(self, folder: Path, tracker: str, *, wait_s: float, warn_s: float) -> None:
        """Start it; returns at once."""
        self._folder, self._tracker, self._wait_s, self._warn_s = folder, tracker, wait_s, warn_s
        home = str(Path(__file__).resolve().parents[2])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainkit.tracking.sending"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the training regularly, and its last rows are part of that
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._say(json.dumps({"folder": str(folder.absolute()), "tracker": tracker, "wait_s": wait_s}))
        self._asked: float | None = time.monotonic()  # starting needs an answer too
        self._warned, self._reason = False, ""

    def look(self) -> None:
        """Warn once if the tracker does not answer; takes microseconds."""
        self._listen()
        silent = self._asked is not None and time.monotonic() - self._asked > self._warn_s
        if self._warned or not (silent or self._reason):
            return
        self._warned = True
        why = self._reason or f"no answer for {self._warn_s:g} s"
        _log.warning(
            "%s cannot be reached (%s). The training continues; its rows are in the run folder, and are sent when it "
            "answers.",
            self._tracker,
            why,
        )

    def end(self) -> None:
        """Let the process send the rest, for at most `wait_s`, and end it; warn if some data was not sent."""
        with suppress(OSError):
            self._say(END)
        with suppress(OSError):
            self._input.close()
        try:
            code = self._process.wait(self._wait_s)
            why = self._reason
        except subprocess.TimeoutExpired:
            code, why = 1, f"no answer within {self._wait_s:g} s"
        self._listen()
        self._kill()
        if code != 0:
            self._record_rest(self._reason or why or f"its process ended with exit code {code}")

    def _kill(self) -> None:
        """End the process, including processes that the tracker's package has started."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _record_rest(self, why: str) -> None:
        command = shlex.join(["python", "-m", "trainkit.tracking", str(self._folder)])
        with suppress(OSError, TrainkitError):
            state = read_state(self._folder, self._tracker)
            if state is not None:
                write_state(self._folder, with_rest(self._folder, state, why))
        _log.warning("%s did not receive everything: %s. %s sends the rest.", self._tracker, why, command)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            text = os.read(self._process.stdout.fileno(), _CHUNK)
            for line in text.splitlines():
                kind, reason = parse_json(line)
                self._asked = time.monotonic() if kind == ASKS else None
                self._reason = reason if kind == TROUBLE else "" if kind == ANSWERS else self._reason

    @property
    def _input(self) -> Any:
        assert self._process.stdin is not None
        return self._process.stdin

    def _say(self, line: str) -> None:
        self._input.write(f"{line}\n".encode())
        self._input.flush()


@dataclass
class _Sending:
    courier: Courier | None = None


@dataclass(frozen=True, kw_only=True)
class Tracker(Callback):
    """Sends parameters, metrics and files of a run to a tracker, as one tracked run even if it is resumed.

    A separate process reads them from the run folder: no step waits, and no secret is sent, since the folder has none.

    Raises:
        MissingExtraError: the tracker's package is not installed.
    """

    observes: ClassVar[bool] = True
    tracker: ClassVar[str]
    """Name of the tracker, of its package and of its extra."""

    project: Annotated[str | None, cosmetic] = None
    """The project or experiment; null: the run's name."""
    artifacts: Annotated[Sequence[str], cosmetic] = ("resolved.yaml", "result.json", "plots/*.png")
    """Patterns of files in the run folder that are sent at the end, such as `model/*`."""
    warn_s: Annotated[float, cosmetic, above(0)] = 30.0
    """Seconds without an answer after which a warning is printed."""
    wait_s: Annotated[float, cosmetic, above(0)] = 30.0
    """Largest number of seconds that the end of the run waits for the tracker."""
    _sending: _Sending = field(default_factory=_Sending, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            importlib.metadata.version(
                self.tracker
            )  # a folder with the tracker's name in the current folder is not a package
        except importlib.metadata.PackageNotFoundError:
            key = f"logger.{self.tracker}"
            raise MissingExtraError(key=key, package=self.tracker, extra=self.tracker) from None

    @property
    def connection(self) -> str:
        """`online` or `offline`."""
        return "online"

    def run_start(self, run: Run) -> None:
        """Start the sending process."""
        if not run.is_owner:
            return
        wanted = TrackingState(
            tracker=self.tracker,
            project=self.project or run.cfg.name or "trainkit",
            mode=self.connection,
            artifacts=list(self.artifacts),
        )
        begun_state(run.folder, wanted)
        self._sending.courier = Courier(run.folder, self.tracker, wait_s=self.wait_s, warn_s=self.warn_s)

    def log(self, run: Run, row: Row) -> None:
        """Check whether the tracker answers; the row is in `metrics.jsonl`."""
        if self._sending.courier is not None:
            self._sending.courier.look()

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Send the rest, within the time limit."""
        courier, self._sending.courier = self._sending.courier, None
        if courier is not None:
            courier.end()


@dataclass(frozen=True, kw_only=True)
class Mlflow(Tracker):
    """Sends a run to MLflow: to the store of `MLFLOW_TRACKING_URI`, or to `mlflow.db` in the current folder.

    `project` is the experiment. To view it: mlflow ui
    """

    tracker: ClassVar[str] = "mlflow"


@dataclass(frozen=True, kw_only=True)
class Trackio(Tracker):
    """Sends a run to Trackio: to its folder on this machine (`TRACKIO_DIR`), or to the server that its own variables
    name.

    To view it: trackio show
    """

    tracker: ClassVar[str] = "trackio"


@dataclass(frozen=True, kw_only=True)
class Wandb(Tracker):
    """Sends a run to Weights & Biases; its server and key are those of `wandb login`, WANDB_BASE_URL, WANDB_API_KEY.

    Offline, the run is written to `RUN/tracking/wandb`, which `wandb sync` uploads.
    """

    tracker: ClassVar[str] = "wandb"

    mode: Annotated[Literal["online", "offline"], cosmetic] = "online"
    """Whether to send during the run, or to write for a later upload."""

    @property
    def connection(self) -> str:
        """`online` or `offline`."""
        return self.mode
