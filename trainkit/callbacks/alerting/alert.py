"""Report events of a run to a command or a webhook."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from trainkit.callbacks.alerting.channels import Channel, channels_from
from trainkit.config.schema import MonitoredMetric
from trainkit.fields import above, cosmetic, unit
from trainkit.redaction import mask
from trainkit.report.numbers import figure
from trainkit.trainer.events import Callback, Ending, Row, Run

_log = logging.getLogger(__name__)
Event = Literal["failed", "stopped", "finished", "nonfinite"]


@dataclass
class _Told:
    threads: list[threading.Thread] = field(default_factory=list)
    nonfinite: bool = False
    skipped: int | None = None
    better: bool = False


@dataclass(frozen=True, kw_only=True)
class Alert(Callback):
    """Calls the command of TRAINKIT_ALERT_COMMAND and the webhook of TRAINKIT_ALERT_WEBHOOK about a run.

    The process that started the run reports its end, because it also sees ranks that were killed or hung; rank 0
    reports the events during the run. No step waits for a call.

    Raises:
        ConfigError: the environment names neither.
    """

    observes: ClassVar[bool] = True

    events: Annotated[Sequence[Event], cosmetic] = ("failed", "stopped", "nonfinite")
    """Events to report: failed, stopped (also by a signal), finished, nonfinite (a loss or a step that is not finite).
    """
    better_than: Annotated[float | None, cosmetic, unit("of the metric")] = None
    """Report once that `eval.metric` is better than this; null: never."""
    timeout_s: Annotated[float, cosmetic, above(0)] = 10.0
    """Timeout of a call, and of the wait for it at the end of the run."""
    _channels: tuple[Channel, ...] = field(default=(), init=False, repr=False, compare=False)
    _told: _Told = field(default_factory=_Told, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_channels", channels_from(os.environ))

    def log(self, run: Run, row: Row) -> None:
        """Report once that a loss is not finite, or that steps were skipped."""
        told, skipped = self._told, run.state.skipped
        before, told.skipped = told.skipped, skipped
        broken = math.isnan(row.get("train/loss", 0.0)) or math.isinf(row.get("train/loss", 0.0))
        if not (broken or (before is not None and skipped > before)) or told.nonfinite:
            return
        told.nonfinite = True
        if "nonfinite" in self.events and run.is_owner:
            what = "the training loss is not finite" if broken else f"{skipped} steps were left out, not finite"
            self._tell(run, "nonfinite", what)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Report once that the metric is better than the threshold."""
        watched = MonitoredMetric.of(run.cfg.eval)
        value = metrics.get(watched.metric)
        if self.better_than is None or value is None or self._told.better:
            return
        if watched.sign * value < watched.sign * self.better_than:
            self._told.better = True
            if run.is_owner:
                self._tell(
                    run, "better", f"{watched.metric} is {figure(value)}, better than {figure(self.better_than)}"
                )

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Wait for calls in progress, within their limit of time."""
        until = time.monotonic() + self.timeout_s
        for thread in self._told.threads:
            thread.join(max(0.0, until - time.monotonic()))

    def ended(self, ending: Ending) -> None:
        """Report how the run ended."""
        event = ending.status if ending.status in ("failed", "finished") else "stopped"
        if event in self.events:
            at = "" if ending.steps is None else f" after {ending.steps:,} steps"
            why = f": {ending.reason}" if ending.reason else ""
            self._send(_message(ending.name, str(ending.folder), event, f"{ending.status}{at}{why}", ending.steps))

    def state(self) -> dict[str, Any]:
        """Return whether the threshold was reported."""
        return {"better": self._told.better}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore whether the threshold was reported."""
        self._told.better = saved["better"]

    def _tell(self, run: Run, event: str, text: str) -> None:
        message = _message(run.cfg.name, str(run.folder), event, text, run.state.step)
        thread = threading.Thread(target=self._send, args=(message,), name="alert", daemon=True)
        thread.start()
        self._told.threads.append(thread)

    def _send(self, message: Mapping[str, Any]) -> None:
        for channel in self._channels:
            if trouble := channel.send(message, timeout_s=self.timeout_s):
                _log.warning("the alert about %s was not sent: %s", message["event"], trouble)


def _message(name: str, folder: str, event: str, text: str, step: int | None) -> dict[str, Any]:
    """Return a message; secrets in it are masked."""
    host = socket.gethostname()
    return {
        "text": mask(f"trainkit {name} on {host}: {text[:1000]} ({folder})"),
        "event": event,
        "run": mask(name),
        "folder": mask(folder),
        "host": host,
        "step": step,
    }
