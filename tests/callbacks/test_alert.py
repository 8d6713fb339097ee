"""An alert that runs a hostile name, hangs the end of a run, prints its secret URL or is sent twice is caught here
alone.
An alert that is not sent, because the run failed outside of its ranks, is caught here alone.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.callbacks.run_double import row, run_double
from trainkit.callbacks.alert import COMMAND, WEBHOOK, Alert, Command, Webhook, channels_from
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, CrashLoopError, NonFiniteError, TerminatedError, TrainkitError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.trainer.events import Ending, ended_hooks

HOSTILE = "$(touch pwned) `touch pwned`; --help '\"\n"


@pytest.fixture(autouse=True)
def no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.delenv(WEBHOOK, raising=False)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the alert's command appends each message to."""
    path, script = tmp_path / "told", tmp_path / "tell"
    script.write_text(f"#!/bin/sh\ncat >> '{path}'\necho >> '{path}'\n")
    script.chmod(0o700)
    monkeypatch.setenv(COMMAND, str(script))
    return path


def messages(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_without_a_channel_or_with_another_url_than_http_nothing_starts() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.alert: has neither a URL nor a command"):
        Alert()
    for url in ("file:///etc/passwd", "hooks.example", "https://", "http://a b"):
        with pytest.raises(ConfigError, match=f"{WEBHOOK}: must be a URL"):
            channels_from({WEBHOOK: url})


@pytest.mark.parametrize(
    ("status", "events", "event"),
    [
        ("finished", {}, None),
        ("finished", {"events": ("finished",)}, "finished"),
        ("preempted", {}, "stopped"),
        ("failed", {}, "failed"),
    ],
)
def test_the_end_of_a_run_is_told_as_text_if_it_is_asked_for(
    tmp_path: Path, told: Path, status: Any, events: dict[str, Any], event: str | None
) -> None:
    Alert(**events).ended(Ending(name=HOSTILE, folder=tmp_path, status=status, reason="why", steps=3))
    found = messages(told)
    assert [message["event"] for message in found] == ([] if event is None else [event])
    for message in found:
        assert (message["run"], message["step"], message["folder"]) == (HOSTILE, 3, str(tmp_path))
        assert f"{status} after 3 steps: why" in message["text"]
    assert not (tmp_path / "pwned").exists()


def test_the_alert_of_a_failed_run_contains_the_reason(tmp_path: Path, told: Path) -> None:
    short = ["recipe=null", "callbacks=[alert]", "logger=[]", "quiet=true", "epochs=null", "steps=9"]
    with pytest.raises(NonFiniteError):
        trainkit.train([*short, "optimizer=sgd", "optimizer.lr=1e30"], run_dir=tmp_path / "run")
    (message,) = messages(told)
    assert message["event"] == "failed"
    assert "the loss is nan" in message["text"]


def test_a_loss_that_is_not_finite_sends_one_alert(tmp_path: Path, told: Path) -> None:
    run, alert = run_double(tmp_path), Alert()
    for step in (10, 20):
        alert.log(run, {**row(step), "train/loss": math.nan})
    alert.run_end(run, {})
    assert [message["event"] for message in messages(told)] == ["nonfinite"]


def test_a_metric_better_than_the_threshold_sends_one_alert_also_after_a_resume(tmp_path: Path, told: Path) -> None:
    run, alert, resumed = run_double(tmp_path), Alert(better_than=0.3), Alert(better_than=0.3)
    for loss in (0.3, 0.29, 0.28):
        alert.eval_end(run, {"val/loss": loss})
    alert.run_end(run, {})
    resumed.restore(alert.state())
    resumed.eval_end(run, {"val/loss": 0.1})
    resumed.run_end(run, {})
    (message,) = messages(told)
    assert "val/loss is 0.29, better than 0.3 (" in message["text"]


def test_a_command_that_fails_or_hangs_is_named_and_ended_with_what_it_started() -> None:
    for words, limit, trouble in (
        (("false",), 60.0, "ended with exit code 1"),
        (("/no/such",), 60.0, "cannot be started: No such file or directory"),
        (("/bin/sh", "-c", "sleep 600 & sleep 600"), 0.2, "did not end within 0.2 s"),
    ):
        assert Command(words=words).send({}, timeout_s=limit) == f"{COMMAND} {trouble}"


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


def test_a_webhook_gets_the_message_as_json_once_and_its_errors_omit_the_url(server: tuple[str, list[Any]]) -> None:
    url, posted = server
    for path, answer in (
        ("", ""),
        ("/moved", f"{WEBHOOK} was answered with HTTP 302"),
        ("/broken", f"{WEBHOOK} was answered with HTTP 500"),
    ):
        assert Webhook(url=url + path).send({"text": HOSTILE}, timeout_s=60) == answer
    assert posted == [{"text": HOSTILE, "content": HOSTILE}] * 3
    trouble = Webhook(url="http://127.0.0.1:9/key-123456").send({"text": ""}, timeout_s=60)
    assert trouble.startswith(f"{WEBHOOK} was not reached")
    assert "123456" not in trouble


CFG = RunConfig.from_dict({"name": "digits", "callbacks": {"alert": {"_target_": "trainkit.callbacks.Alert"}}})


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[Ending]:
    found: list[Ending] = []
    monkeypatch.setenv("TRAINKIT_ALERT_COMMAND", "true")
    monkeypatch.setattr(Alert, "ended", lambda _self, ending: found.append(ending))
    return found


@pytest.mark.parametrize(
    ("error", "status"),
    [(CrashLoopError("rank 1 was killed by SIGKILL\nmore"), "failed"), (TerminatedError("asked to end"), "preempted")],
)
def test_an_error_outside_of_ranks_is_sent(
    tmp_path: Path, endings: list[Ending], error: TrainkitError, status: str
) -> None:
    with pytest.raises(type(error)), ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        raise error
    assert [(one.status, one.reason, one.steps) for one in endings] == [(status, str(error).splitlines()[0], None)]


def test_a_result_reaches_the_ended_hook_with_its_steps(tmp_path: Path, endings: list[Ending]) -> None:
    with ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        (tmp_path / "result.json").write_text('{"status": "finished", "reason": "all steps done", "steps": 7}')
    assert [(one.name, one.status, one.steps) for one in endings] == [("digits", "finished", 7)]


def test_an_error_of_the_hook_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TRAINKIT_ALERT_COMMAND", raising=False)
    with caplog.at_level(logging.WARNING), ended_hooks(CFG, tmp_path, RunFolder(tmp_path).read_result):
        pass
    assert "callbacks.alert failed in ended: ConfigError" in caplog.text
