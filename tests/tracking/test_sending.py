"""A row that a tracker gets twice or never, a file outside of the run that it gets, a run that a resume makes two, and
a training that waits for a tracker that hangs are caught here alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.callbacks.run_double import row, run_double
from tests.tracking.folders import FINGERPRINT, Recording, add_rows, run_folder
from trainkit.cli import main
from trainkit.errors import ConfigError, UnreadableError
from trainkit.tracking import sending
from trainkit.tracking.sending import Sender, TrackingState, begun_state, files_of, path_of, read_state
from trainkit.tracking.service import LoggedRow
from trainkit.tracking.tracker import Wandb


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording()
    monkeypatch.setattr(sending, "SERVICES", {"wandb": lambda: recording})
    monkeypatch.setattr(sending, "_SETTLE_S", 0.0)
    return recording


def sender_of(folder: Path) -> Sender:
    return Sender(folder, begun_state(folder, TrackingState(tracker="wandb", project="digits")))


def state_in(folder: Path) -> TrackingState:
    state = read_state(folder, "wandb")
    assert state is not None
    return state


def losses(*steps: int) -> list[dict[str, float | None]]:
    return [{"step": step, "train/loss": 1 / step} for step in steps]


def test_a_tracker_receives_the_flat_config_and_the_fingerprint(tmp_path: Path, service: Recording) -> None:
    text = "name: digits\nbatch: {global_size: 64, drop_last: false}\nresume: null\nsizes: [1, 2]\n"
    sender_of(run_folder(tmp_path, resolved=text)).send_new()
    assert service.opened[0].fingerprint == FINGERPRINT
    assert service.opened[0].parameters == {
        "name": "digits", "batch.global_size": 64, "batch.drop_last": False, "sizes": "[1, 2]"
    }  # fmt: skip


def test_each_row_is_sent_once_also_of_an_evaluator_and_without_what_is_not_finite(
    tmp_path: Path, service: Recording
) -> None:
    sender = sender_of(run_folder(tmp_path))
    add_rows(tmp_path, {"step": 10, "train/loss": 0.5, "lr": None})
    sender.send_new()
    add_rows(tmp_path, {"step": 20, "train/loss": 0.4})
    (tmp_path / "evaluations.jsonl").write_text('{"step": 10, "val/loss": 0.25}\n')
    sender.send_new()
    sender.send_new()
    assert service.points == [(10, {"train/loss": 0.5}), (20, {"train/loss": 0.4}), (10, {"val/loss": 0.25})]


def test_a_resumed_run_is_the_same_tracked_run_of_one_placement_and_repeats_no_step(
    tmp_path: Path, service: Recording
) -> None:
    resolved = "optimizer: {lr: 0.1}\nstrategy: {_target_: OneDevice, device: auto}\n"
    add_rows(run_folder(tmp_path, resolved=resolved), *losses(10, 20))
    sender_of(tmp_path).send_new()
    (tmp_path / "metrics.jsonl").unlink()
    resolved = "optimizer: {lr: 0.1}\nepochs: 3\nstrategy: {_target_: Mirrored, replicas: 2}\n"
    add_rows(run_folder(tmp_path, resolved=resolved), *losses(10, 20, 30))
    sender_of(tmp_path).send_new()
    assert [step for step, _ in service.points] == [10, 20, 30]
    first, second = service.opened
    assert first.id == second.id
    assert first.parameters == {"optimizer.lr": 0.1, "strategy._target_": "OneDevice", "strategy.device": "auto"}
    assert second.parameters == {**first.parameters, "epochs": 3}


def test_rows_of_a_file_that_was_replaced_meanwhile_are_read_anew(tmp_path: Path, service: Recording) -> None:
    sender = sender_of(run_folder(tmp_path))
    add_rows(tmp_path, *losses(10, 20))
    sender.send_new()
    (tmp_path / "kept").write_text(json.dumps({"step": 30, "train/loss": 0.3}) + "\n")
    (tmp_path / "kept").replace(tmp_path / "metrics.jsonl")
    sender.send_new()
    assert [step for step, _ in service.points] == [10, 20, 30]


def test_what_a_tracker_refused_is_sent_when_it_answers_again(tmp_path: Path, service: Recording) -> None:
    sender = sender_of(run_folder(tmp_path))
    add_rows(tmp_path, *losses(10))
    sender.send_new()
    add_rows(tmp_path, *losses(20))
    service.fails = ConnectionError("no route.")
    with pytest.raises(ConnectionError) as caught:
        sender.send_new()
    sender.trouble(sending.reason_of(caught.value))
    not_sent = "everything after step 10, the files and the end: ConnectionError: no route"
    assert state_in(tmp_path).not_sent == not_sent
    sender.send_new()
    assert [step for step, _ in service.points] == [10, 20]


def test_a_last_row_that_the_service_keeps_back_is_sent_again_after_a_kill(tmp_path: Path, service: Recording) -> None:
    service.holds_last = True
    add_rows(run_folder(tmp_path), *losses(10, 20))
    sender_of(tmp_path).send_new()
    sender_of(tmp_path).send_new()
    assert [step for step, _ in service.points] == [10, 20, 20]


def test_the_end_sends_the_files_and_the_status_and_without_a_result_the_run_was_killed(
    tmp_path: Path, service: Recording
) -> None:
    folder = run_folder(tmp_path)
    begun_state(folder, TrackingState(tracker="wandb", project="digits", artifacts=["*.json"]))
    for status in ("killed", "failed"):
        assert main(["report", str(folder), "--send"]) == 0
        (folder / "result.json").write_text('{"status": "failed"}')
        assert service.closed[-1] == (False, status)
    assert service.files == ["environment.json", "environment.json", "result.json"]
    state = state_in(folder)
    assert (state.status, state.not_sent, state.send) == ("failed", None, None)


def test_no_file_outside_of_the_folder_is_sent(tmp_path: Path) -> None:
    secret, folder = tmp_path / "id_rsa", run_folder(tmp_path / "run")
    secret.write_text("key")
    (folder / "link").symlink_to(secret)
    (folder / "plots").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    files = files_of(folder, ["*", "plots/*", "../*", str(secret)])
    assert [name for _, name in files] == ["environment.json", "resolved.yaml"]


def test_a_crafted_state_is_refused_and_without_one_there_is_nothing_to_send(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_folder(tmp_path)), "--send"]) != 0
    assert "the run had no tracker" in capsys.readouterr().err
    path_of(tmp_path, "wandb").parent.mkdir()
    other = {"tracker": "os", "id": "0" * 32, "project": "p", "mode": "online", "artifacts": [], "sent": {}}
    for content in ('{"tracker": "../../x", "id": "00"}', "[]", json.dumps(other)):
        path_of(tmp_path, "wandb").write_text(content)
        with pytest.raises(UnreadableError):
            read_state(tmp_path, "wandb")


def test_rows_that_are_no_rows_are_passed_over(tmp_path: Path, service: Recording) -> None:
    sender = sender_of(run_folder(tmp_path))
    lines = ["[]", "{", '{"step": true, "a": 1}', '{"step": 1, "a": "b", "c": [1]}', '{"step": 1e400}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "a": 1}', '{"step": 4']))
    sender.send_new()
    assert service.points == [(3, {"a": 1.0})]


def test_an_absent_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match=r'logger.wandb: needs the package wandb. Install it: pip install "wandb>='):
        Wandb()


class Hanging(Recording):
    """A service that answers no call until `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def log(self, rows: Sequence[LoggedRow]) -> None:
        self.answers.wait(60)
        super().log(rows)


def test_a_tracker_that_hangs_gets_one_warning_and_a_limited_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Hanging()
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")
    monkeypatch.setattr(sending, "SERVICES", {"wandb": lambda: service})
    monkeypatch.setattr(sending, "_RETRY_S", (0.01,))
    run = run_double(run_folder(tmp_path / "run"))
    tracker = Wandb(warn_s=0.01, wait_s=0.2)
    with caplog.at_level(logging.WARNING):
        tracker.run_start(run)
        add_rows(run.folder, row(10))
        for _ in range(3):
            time.sleep(0.1)
            tracker.log(run, row(10))
        tracker.run_end(run, {})
    first, last = caplog.messages
    assert first.startswith("wandb cannot be reached (no answer for 0.01 s). The training continues")
    assert last.endswith(f"trainkit report {run.folder} --send sends the rest.")
    state = state_in(run.folder)
    assert state.not_sent == "everything after step 0, the files and the end: no answer within 0.2 s"
    service.answers.set()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "tracker"]
    thread.join(10)
    assert state_in(run.folder) == state  # nobody waits for it any more


def test_a_tracker_that_fails_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, service: Recording
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")
    service.fails = ConnectionError("no route to the key-1234567")
    run, tracker = run_double(run_folder(tmp_path / "run")), Wandb(wait_s=60)
    tracker.run_start(run)
    tracker.run_end(run, {})
    assert "wandb did not receive everything: ConnectionError: no route" in caplog.text


def test_a_run_is_sent_while_it_goes_on_and_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Recording
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")
    run, tracker = run_double(run_folder(tmp_path / "run")), Wandb(wait_s=60)
    tracker.run_start(run)
    add_rows(run.folder, *losses(10, 20))
    tracker.run_end(run, {})
    assert ([step for step, _ in service.points], service.closed) == ([10, 20], [(False, "killed")])
