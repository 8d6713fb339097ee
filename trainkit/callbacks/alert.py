"""Report events of a run to the command or the webhook set in the environment, with a message as JSON.

A config may come from the folder of another user's run, which `trainkit resume` reads: it must not name what this
machine runs, nor where it connects to. So both stand in environment variables, which a run folder cannot set.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from trainkit.config.schema import MonitoredMetric
from trainkit.errors import Problem, first_line, refuse
from trainkit.fields import above, cosmetic, unit
from trainkit.redaction import mask, remember
from trainkit.report.numbers import figure
from trainkit.trainer.events import Callback, Ending, Row, Run

COMMAND: Final = "TRAINKIT_ALERT_COMMAND"
"""Variable with a command and its arguments; the command gets the message on its standard input."""
WEBHOOK: Final = "TRAINKIT_ALERT_WEBHOOK"
"""The variable with the URL that the message is posted to; a secret."""


Message = Mapping[str, Any]
Channel = Callable[[Message, float], str]
"""Sends a message within a number of seconds; returns why it was not sent, or an empty text."""


def call_command(words: Sequence[str], message: Message, timeout_s: float) -> str:
    """Start a command without a shell, wait for it, and end it with all that it has started after `timeout_s`.

    Nothing of the message is an argument.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - the user's own command, as arguments
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return f"{COMMAND} cannot be started: {error.strerror}"
    try:
        process.communicate(json.dumps(message).encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"{COMMAND} did not end within {timeout_s:g} s"
    return f"{COMMAND} ended with exit code {process.returncode}" if process.returncode else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send a message elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse the redirect."""


def post(url: str, message: Message, timeout_s: float) -> str:
    """Post a message as JSON: Slack and Mattermost read `text`, Discord reads `content`.

    The returned text never contains the URL, which is a secret.
    """
    body = json.dumps({**message, "content": message["text"]}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")  # noqa: S310 - http, checked before
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s).close()
    except urllib.error.HTTPError as error:
        error.close()
        return f"{WEBHOOK} was answered with HTTP {error.code}"
    except (OSError, ValueError) as error:
        return f"{WEBHOOK} was not reached: {mask(first_line(error))}"
    return ""


def channels_from(environ: Mapping[str, str]) -> tuple[Channel, ...]:
    """Return the command and the webhook of an environment.

    Raises:
        ConfigError: there is neither, or one cannot be used.
    """
    channels, problems = list[Channel](), list[Problem]()
    if text := environ.get(COMMAND):
        try:
            channels.append(partial(call_command, shlex.split(text)))
        except ValueError as error:
            problems.append(Problem(key=COMMAND, rule=f"is not a command with arguments: {error}."))
    if url := environ.get(WEBHOOK):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.netloc and url.isprintable() and " " not in url:
            remember(url)
            channels.append(partial(post, url))
        else:
            problems.append(Problem(key=WEBHOOK, rule="must be a URL that begins with https:// or http://."))
    if not channels and not problems:
        rule = (
            f"has neither a URL nor a command to call. Set {WEBHOOK}=https://... or "
            f"{COMMAND}='PROGRAM ARGUMENTS', or leave the callback alert out."
        )
        problems.append(Problem(key="callbacks.alert", rule=rule))
    refuse(problems)
    return tuple(channels)


_log = logging.getLogger(__name__)
Event = Literal["failed", "stopped", "finished", "nonfinite"]


@dataclass(kw_only=True, eq=False)
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
    timeout_s: Annotated[float, cosmetic, above(0), unit("seconds")] = 10.0
    """Timeout of a call, and of the wait for it at the end of the run."""
    _channels: tuple[Channel, ...] = field(default=(), init=False, repr=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False, repr=False)
    _skipped: int | None = field(default=None, init=False, repr=False)
    _has_reported_nonfinite: bool = field(default=False, init=False, repr=False)
    _has_reported_better: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._channels = channels_from(os.environ)

    def log(self, run: Run, row: Row) -> None:
        """Report once that a loss is not finite, or that steps were skipped."""
        skipped, broken = run.state.skipped, not math.isfinite(row.get("train/loss", 0.0))
        before, self._skipped = self._skipped, skipped
        if not (broken or (before is not None and skipped > before)) or self._has_reported_nonfinite:
            return
        self._has_reported_nonfinite = True
        if "nonfinite" in self.events and run.is_owner:
            what = "the training loss is not finite" if broken else f"{skipped} steps were left out, not finite"
            self._notify(run, "nonfinite", what)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Report once that the metric is better than the threshold."""
        watched = MonitoredMetric.of(run.cfg.eval)
        value = metrics.get(watched.metric)
        if self.better_than is None or value is None or self._has_reported_better:
            return
        self._has_reported_better = watched.sign * value < watched.sign * self.better_than
        if self._has_reported_better and run.is_owner:
            self._notify(run, "better", f"{watched.metric} is {figure(value)}, better than {figure(self.better_than)}")

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Wait for calls in progress, within their limit of time."""
        until = time.monotonic() + self.timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def ended(self, ending: Ending) -> None:
        """Report how the run ended."""
        event = ending.status if ending.status in ("failed", "finished") else "stopped"
        if event in self.events:
            after = "" if ending.steps is None else f" after {ending.steps:,} steps"
            why = f": {ending.reason}" if ending.reason else ""
            self._send(_message(ending.name, str(ending.folder), event, f"{ending.status}{after}{why}", ending.steps))

    def state(self) -> dict[str, Any]:
        """Return whether the threshold was reported."""
        return {"better": self._has_reported_better}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore whether the threshold was reported."""
        self._has_reported_better = saved["better"]

    def _notify(self, run: Run, event: str, text: str) -> None:
        message = _message(run.cfg.name, str(run.folder), event, text, run.state.step)
        thread = threading.Thread(target=self._send, args=(message,), name="alert", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _send(self, message: Mapping[str, Any]) -> None:
        for channel in self._channels:
            if trouble := channel(message, self.timeout_s):
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
