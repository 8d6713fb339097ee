"""The loggers that send a run to a tracker."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from trainkit.errors import MissingExtraError
from trainkit.fields import above, cosmetic, unit
from trainkit.tracking.sending import Sender, TrackingState, begun_state
from trainkit.trainer.events import Callback, Row, Run

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Tracker(Callback):
    """Sends parameters, metrics and files of a run to a tracker, as one tracked run even if it is resumed.

    A thread reads them from the run folder: no step waits, and no secret is sent, since the folder has none.

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
    warn_s: Annotated[float, cosmetic, above(0), unit("seconds")] = 30.0
    """Seconds without an answer after which a warning is printed."""
    wait_s: Annotated[float, cosmetic, above(0), unit("seconds")] = 30.0
    """Largest number of seconds that the end of the run waits for the tracker."""
    _sending: Sender | None = field(default=None, init=False, repr=False)
    _has_warned: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            importlib.metadata.version(self.tracker)  # a folder of this name in the current folder is not a package
        except importlib.metadata.PackageNotFoundError:
            key = f"logger.{self.tracker}"
            raise MissingExtraError(key=key, package=self.tracker, extra=self.tracker) from None

    @property
    def connection(self) -> str:
        """`online` or `offline`."""
        return "online"

    def run_start(self, run: Run) -> None:
        """Start to send."""
        if run.is_owner:
            project, artifacts = self.project or run.cfg.name or "trainkit", list(self.artifacts)
            state = TrackingState(tracker=self.tracker, project=project, mode=self.connection, artifacts=artifacts)
            self._sending = Sender(run.folder, begun_state(run.folder, state))
            self._sending.start()

    def log(self, run: Run, row: Row) -> None:
        """Warn once if the tracker does not answer; the row is in `metrics.jsonl`."""
        if self._sending is None or self._has_warned:
            return
        why = self._sending.reason
        if not why and self._sending.silent_s() > self.warn_s:
            why = f"no answer for {self.warn_s:g} s"
        if why:
            self._has_warned = True
            _log.warning(
                "%s cannot be reached (%s). The training continues; its rows are in the run folder, and are sent when "
                "it answers.",
                self.tracker,
                why,
            )

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Send the rest, within the time limit."""
        sending, self._sending = self._sending, None
        if sending is not None and (why := sending.end(self.wait_s)):
            rest = f"trainkit report {run.folder} --send sends the rest."
            _log.warning("%s did not receive everything: %s. %s", self.tracker, why, rest)


@dataclass(kw_only=True, eq=False)
class Mlflow(Tracker):
    """Sends a run to MLflow: to the store of `MLFLOW_TRACKING_URI`, or to `mlflow.db` in the current folder.

    `project` is the experiment. To view it: mlflow ui
    """

    tracker: ClassVar[str] = "mlflow"


@dataclass(kw_only=True, eq=False)
class Trackio(Tracker):
    """Sends a run to Trackio: to its folder on this machine (`TRACKIO_DIR`), or to the server that its own variables
    name.

    To view it: trackio show
    """

    tracker: ClassVar[str] = "trackio"


@dataclass(kw_only=True, eq=False)
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
