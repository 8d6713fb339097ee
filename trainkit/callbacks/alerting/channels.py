"""Call the command and the webhook set in the environment, with a message as JSON.

A config may come from the folder of another user's run, which `trainkit resume` reads: it must not name what this
machine runs, nor where it connects to. So both stand in environment variables, which a run folder cannot set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from trainkit.errors import ConfigError, Problem
from trainkit.frames import first_line
from trainkit.redaction import mask, remember

COMMAND: Final = "TRAINKIT_ALERT_COMMAND"
"""Variable with a command and its arguments; the command gets the message on its standard input."""
WEBHOOK: Final = "TRAINKIT_ALERT_WEBHOOK"
"""The variable with the URL that the message is posted to; a secret."""


class Channel(Protocol):
    """One way to send a message."""

    def send(self, message: Mapping[str, Any], *, timeout_s: float) -> str:
        """Send a message; return why it was not sent, or an empty text."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, started without a shell; nothing of a message is an argument of it."""

    words: tuple[str, ...]
    """The program and its arguments."""

    def send(self, message: Mapping[str, Any], *, timeout_s: float) -> str:
        """Start the command, wait for it, and end it with all that it has started after `timeout_s`."""
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command, as arguments
                self.words,
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


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """A URL that takes JSON by POST; Slack and Mattermost read `text`, Discord reads `content`."""

    url: str
    """An http or https URL."""

    def send(self, message: Mapping[str, Any], *, timeout_s: float) -> str:
        """Post a message; the returned text never contains the URL, which is a secret."""
        body = {**message, "content": message["text"]}
        request = urllib.request.Request(  # noqa: S310 - http and https alone, checked before
            self.url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
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
    found: list[Channel] = []
    problems = []
    if text := environ.get(COMMAND):
        try:
            found.append(Command(words=tuple(shlex.split(text))))
        except ValueError as error:
            problems.append(Problem(key=COMMAND, rule=f"is not a command with arguments: {error}."))
    if url := environ.get(WEBHOOK):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.netloc and url.isprintable() and " " not in url:
            remember(url)
            found.append(Webhook(url=url))
        else:
            problems.append(Problem(key=WEBHOOK, rule="must be a URL that begins with https:// or http://."))
    if not found and not problems:
        rule = (
            f"has neither a URL nor a command to call. Set {WEBHOOK}=https://... or "
            f"{COMMAND}='PROGRAM ARGUMENTS', or leave the callback alert out."
        )
        problems.append(Problem(key="callbacks.alert", rule=rule))
    if problems:
        raise ConfigError(problems)
    return tuple(found)
