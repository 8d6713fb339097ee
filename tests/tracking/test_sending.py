"""What of a run folder is sent to a tracker, once, whatever happens to the tracker or the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.tracking.folders import FINGERPRINT, Recording, add_rows, run_folder
from trainkit.errors import UnreadableError
from trainkit.tracking import sending
from trainkit.tracking.records import files_of
from trainkit.tracking.sending import Sender, send_later
from trainkit.tracking.state import TrackingState, begun_state, path_of, read_state


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Recording:
    found = Recording()
    monkeypatch.setattr(sending, "service_of", lambda _name: found)
    return found


def sender_of(folder: Path) -> Sender:
    return Sender(folder=folder, state=begun_state(folder, TrackingState(tracker="wandb", project="digits")))


def test_a_tracker_receives_the_flat_config_and_the_fingerprint(tmp_path: Path, service: Recording) -> None:
    text = "name: digits\nbatch: {global_size: 64, drop_last: false}\nresume: null\nlogger: {w: {token: (redacted)}}\n"
    sender_of(run_folder(tmp_path, resolved=text + "sizes: [1, 2]\n")).send_new()
    run = service.opened[0]
    assert run.fingerprint == FINGERPRINT
    assert run.parameters == {
        "name": "digits",
        "batch.global_size": 64,
        "batch.drop_last": False,
        "logger.w.token": "(redacted)",
        "sizes": "[1, 2]",
    }


def test_each_row_is_sent_once_and_numbers_that_are_not_finite_are_left_out(tmp_path: Path, service: Recording) -> None:
    sender = sender_of(run_folder(tmp_path))
    add_rows(tmp_path, {"step": 10, "train/loss": 0.5, "lr": None})
    sender.send_new()
    add_rows(tmp_path, {"step": 10, "val/loss": 0.25}, {"step": 20, "train/loss": 0.4})
    sender.send_new()
    sender.send_new()
    assert service.points == [(10, {"train/loss": 0.5}), (10, {"val/loss": 0.25}), (20, {"train/loss": 0.4})]


def test_a_resumed_run_is_the_same_tracked_run_and_repeats_no_step(tmp_path: Path, service: Recording) -> None:
    add_rows(run_folder(tmp_path), {"step": 10, "train/loss": 0.5}, {"step": 20, "train/loss": 0.4})
    sender_of(tmp_path).send_new()
    (tmp_path / "metrics.jsonl").unlink()
    add_rows(
        tmp_path, {"step": 10, "train/loss": 0.5}, {"step": 20, "train/loss": 0.4}, {"step": 30, "train/loss": 0.3}
    )
    sender_of(tmp_path).send_new()
    assert [step for step, _ in service.points] == [10, 20, 30]
    assert len({run.id for run in service.opened}) == 1


def test_a_run_that_moves_has_the_parameters_of_one_placement(tmp_path: Path, service: Recording) -> None:
    first = "optimizer: {lr: 0.1}\nstrategy: {_target_: OneDevice, device: auto}\n"
    sender_of(run_folder(tmp_path, resolved=first)).send_new()
    moved = "optimizer: {lr: 0.1}\nepochs: 3\nstrategy: {_target_: Mirrored, replicas: 2}\n"
    sender_of(run_folder(tmp_path, resolved=moved)).send_new()
    same = {"optimizer.lr": 0.1, "strategy._target_": "OneDevice", "strategy.device": "auto"}
    assert [run.parameters for run in service.opened] == [same, {**same, "epochs": 3}]


def test_rows_of_a_file_that_was_replaced_meanwhile_are_read_anew(tmp_path: Path, service: Recording) -> None:
    sender = sender_of(run_folder(tmp_path))
    add_rows(tmp_path, {"step": 10, "train/loss": 0.5}, {"step": 20, "train/loss": 0.4})
    sender.send_new()
    kept = tmp_path / "kept"
    kept.write_text(json.dumps({"step": 30, "train/loss": 0.3}) + "\n")
    kept.replace(tmp_path / "metrics.jsonl")
    sender.send_new()
    assert [step for step, _ in service.points] == [10, 20, 30]


def test_what_a_tracker_refused_is_sent_when_it_answers_again(tmp_path: Path, service: Recording) -> None:
    sender = sender_of(run_folder(tmp_path))
    add_rows(tmp_path, {"step": 10, "train/loss": 0.5})
    sender.send_new()
    add_rows(tmp_path, {"step": 20, "train/loss": 0.4})
    service.fails = ConnectionError("no route")
    with pytest.raises(ConnectionError):
        sender.send_new()
    assert sender.trouble(ConnectionError("no route.")) == "ConnectionError: no route"
    state = read_state(tmp_path, "wandb")
    assert state is not None
    assert state.not_sent == "everything after step 10, the files and the end: ConnectionError: no route"
    sender.send_new()
    assert [step for step, _ in service.points] == [10, 20]


def test_the_end_sends_the_files_and_the_status(tmp_path: Path, service: Recording) -> None:
    folder = run_folder(tmp_path)
    (folder / "result.json").write_text('{"status": "failed"}')
    begun_state(folder, TrackingState(tracker="wandb", project="digits", artifacts=["*.json"]))
    assert send_later(folder) == 0
    assert service.files == ["environment.json", "result.json"]
    assert service.closed == [(False, "failed")]
    state = read_state(folder, "wandb")
    assert state is not None
    assert (state.status, state.not_sent, state.send) == ("failed", None, None)


def test_a_run_without_a_result_was_killed(tmp_path: Path, service: Recording) -> None:
    sender_of(run_folder(tmp_path)).finish()
    assert service.closed == [(False, "killed")]


def test_a_folder_without_a_tracker_has_nothing_to_send(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="the run had no tracker"):
        send_later(run_folder(tmp_path))


def test_no_file_outside_of_the_folder_is_sent(tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("key")
    folder = run_folder(tmp_path / "run")
    (folder / "link").symlink_to(secret)
    (folder / "plots").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    assert [name for _, name in files_of(folder, ["*", "plots/*", "../*", str(secret)])] == [
        "environment.json",
        "resolved.yaml",
    ]


@pytest.mark.parametrize(
    "content",
    [
        '{"tracker": "../../x", "id": "00"}',
        "[]",
        "x" * 100,
        json.dumps({"tracker": "os", "id": "0" * 32, "project": "p", "mode": "online", "artifacts": [], "sent": {}}),
    ],
)
def test_a_crafted_state_is_refused(tmp_path: Path, content: str) -> None:
    path_of(tmp_path, "wandb").parent.mkdir()
    path_of(tmp_path, "wandb").write_text(content)
    with pytest.raises(UnreadableError):
        read_state(tmp_path, "wandb")


def test_rows_that_are_no_rows_are_passed_over(tmp_path: Path, service: Recording) -> None:
    sender = sender_of(run_folder(tmp_path))
    lines = ["[]", "{", '{"step": "x"}', '{"step": true, "a": 1}', '{"step": 1, "a": "b", "c": [1]}', '{"step": 1e400}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "a": 1}', '{"step": 4']))
    sender.send_new()
    assert service.points == [(3, {"a": 1.0})]
