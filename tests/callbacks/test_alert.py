"""Alerts: a command or webhook of the environment is called, in bounded time, and what it is told is data."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.alerting.alert import Alert
from trainkit.callbacks.alerting.channels import COMMAND, WEBHOOK, Command, Webhook, channels_from
from trainkit.errors import ConfigError, NonFiniteError
from trainkit.trainer.events import Ending

HOSTILE = "$(touch pwned) `touch pwned`; --help '\"\n"
SHORT = ("recipe=null", "callbacks=[alert]", "logger=[]", "quiet=true", "epochs=null")


@pytest.fixture(autouse=True)
def no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.delenv(WEBHOOK, raising=False)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the alert's command appends each message to."""
    path = tmp_path / "told"
    script = tmp_path / "tell"
    script.write_text(f"#!/bin/sh\ncat >> '{path}'\necho >> '{path}'\n")
    script.chmod(0o700)
    monkeypatch.setenv(COMMAND, str(script))
    return path


def messages(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """A webhook on the loopback interface, and what was posted to it: /moved redirects, /broken is an error."""
    posted: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response({"/moved": 302, "/broken": 500}.get(self.path, 200))
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}", posted
        found.shutdown()
        thread.join()


def test_without_a_channel_nothing_starts() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.alert: has neither a URL nor a command"):
        Alert()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "hooks.example", "https://", "http://a b"])
def test_a_webhook_is_an_http_url(url: str) -> None:
    with pytest.raises(ConfigError, match=f"{WEBHOOK}: must be a URL that begins with https:// or http://."):
        channels_from({WEBHOOK: url})


def test_a_finished_run_sends_an_alert_only_if_configured(tmp_path: Path, told: Path) -> None:
    ending = Ending(name="digits", folder=tmp_path, status="finished", reason="all steps done", steps=3)
    Alert().ended(ending)
    assert messages(told) == []
    Alert(events=("finished",)).ended(ending)
    (message,) = messages(told)
    assert (message["event"], message["step"], message["folder"]) == ("finished", 3, str(tmp_path))


def test_a_signal_sends_an_alert_of_a_stop(tmp_path: Path, told: Path) -> None:
    Alert().ended(Ending(name="digits", folder=tmp_path, status="preempted", reason="a signal", steps=3))
    (message,) = messages(told)
    assert message["event"] == "stopped"
    assert "preempted after 3 steps: a signal" in message["text"]


def test_the_alert_of_a_failed_run_contains_the_reason(tmp_path: Path, told: Path) -> None:
    with pytest.raises(NonFiniteError):
        trainkit.train([*SHORT, "optimizer=sgd", "optimizer.lr=1e30", "steps=9"], run_dir=tmp_path / "run")
    (message,) = messages(told)
    assert message["event"] == "failed"
    assert "the loss is nan" in message["text"]


def test_a_hostile_name_is_text(tmp_path: Path, told: Path) -> None:
    Alert().ended(Ending(name=HOSTILE, folder=tmp_path, status="failed", reason=HOSTILE, steps=None))
    (message,) = messages(told)
    assert message["run"] == HOSTILE
    assert not (tmp_path / "pwned").exists()


def test_a_loss_that_is_not_finite_sends_one_alert(tmp_path: Path, told: Path) -> None:
    run, alert = run_double(tmp_path), Alert()
    for step in (10, 20):
        alert.log(run, {**row(step), "train/loss": math.nan})
    alert.run_end(run, {})
    assert [message["event"] for message in messages(told)] == ["nonfinite"]


def test_a_metric_better_than_the_threshold_sends_one_alert_also_after_a_resume(tmp_path: Path, told: Path) -> None:
    run, alert = run_double(tmp_path), Alert(better_than=0.3)
    for loss in (0.3, 0.29, 0.28):
        alert.eval_end(run, {"val/loss": loss})
    alert.run_end(run, {})
    resumed = Alert(better_than=0.3)
    resumed.restore(alert.state())
    resumed.eval_end(run, {"val/loss": 0.1})
    resumed.run_end(run, {})
    assert [message["text"].partition(": ")[2][:35] for message in messages(told)] == [
        "val/loss is 0.29, better than 0.3 ("[:35]
    ]


def test_a_command_that_hangs_is_ended_with_what_it_started() -> None:
    trouble = Command(words=("/bin/sh", "-c", "sleep 600 & sleep 600")).send({}, timeout_s=0.2)
    assert trouble == f"{COMMAND} did not end within 0.2 s"


@pytest.mark.parametrize(
    ("words", "trouble"),
    [(("false",), "ended with exit code 1"), (("/no/such",), "cannot be started: No such file or directory")],
)
def test_a_command_that_fails_is_named(words: tuple[str, ...], trouble: str) -> None:
    assert Command(words=words).send({}, timeout_s=60) == f"{COMMAND} {trouble}"


def test_a_webhook_gets_the_message_as_json(server: tuple[str, list[Any]]) -> None:
    url, posted = server
    assert Webhook(url=url).send({"text": HOSTILE}, timeout_s=60) == ""
    assert posted == [{"text": HOSTILE, "content": HOSTILE}]


@pytest.mark.parametrize(("path", "code"), [("/moved", 302), ("/broken", 500)])
def test_a_redirect_or_an_error_of_a_webhook_is_named_without_its_url(
    server: tuple[str, list[Any]], path: str, code: int
) -> None:
    url, posted = server
    assert Webhook(url=url + path).send({"text": ""}, timeout_s=60) == f"{WEBHOOK} was answered with HTTP {code}"
    assert len(posted) == 1


def test_an_error_about_an_unreachable_webhook_omits_its_url() -> None:
    trouble = Webhook(url="http://127.0.0.1:9/key-123456").send({"text": ""}, timeout_s=60)
    assert trouble.startswith(f"{WEBHOOK} was not reached")
    assert "123456" not in trouble
