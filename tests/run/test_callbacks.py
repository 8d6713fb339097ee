"""An alert that is not sent, because the run failed outside of its ranks, is caught here alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trainkit.callbacks.alerting.alert import Alert
from trainkit.config.schema import RunConfig
from trainkit.errors import CrashLoopError, TerminatedError, TrainkitError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.trainer.events import Ending, ended_hooks

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
