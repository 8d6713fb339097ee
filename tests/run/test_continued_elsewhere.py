"""A run that continues in another folder: `resume=RUN`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.callbacks.test_tensorboard import read as read_events
from tests.contract.running import run

# The loss rises, so the first evaluation, at step 3, is the best one.
RISING = (
    "model=net", "data=points", "epochs=6", "optimizer=sgd", "optimizer.lr=0.05", "optimizer.maximize=true",
    "schedule=constant", "batch.global_size=16", "batch.micro_size=8", "eval.metric=val/loss", "log_every_steps=1",
    "logger=[tensorboard]",
)  # fmt: skip


def index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "checkpoints/index.json").read_text())
    return found


def steps(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for line in lines if "train/loss" in (row := json.loads(line))]


@pytest.mark.parametrize("placement", [(), ("strategy=fsdp", "strategy.replicas=2")], ids=["one_device", "fsdp"])
def test_a_run_continued_in_another_folder_is_the_whole_training(tmp_path: Path, placement: tuple[str, ...]) -> None:
    whole = run(tmp_path / "whole", *RISING)
    run(tmp_path / "part", *RISING, "stop_at_step=8")
    with (tmp_path / "part/metrics.jsonl").open("a") as rows:
        rows.write('{"step": 9, "train/loss": 1.0}\n{"ste')  # a step after the checkpoint, and a truncated one
    other = run(tmp_path / "other", *RISING, *placement, f"resume={tmp_path / 'part'}")
    assert index(tmp_path / "other") == index(tmp_path / "whole") == {"last": "step_00000018", "best": "step_00000003"}
    assert (tmp_path / "other/model/best/model.safetensors").is_file()
    assert placement or other["weights_sha256"] == whole["weights_sha256"]
    assert steps(tmp_path / "other") == list(range(1, 19))
    curve = read_events(tmp_path / "other").Scalars("train/loss")
    assert [event.step for event in curve] == list(range(1, 19))


def test_the_other_folder_is_not_needed_after_the_start(tmp_path: Path) -> None:
    run(tmp_path / "part", *RISING, "stop_at_step=8")
    run(tmp_path / "other", *RISING, f"resume={tmp_path / 'part'}", "stop_at_step=8")
    shutil.rmtree(tmp_path / "part")
    run(tmp_path / "other", *RISING, "resume=auto")
    assert index(tmp_path / "other")["best"] == "step_00000003"


def test_files_are_copied_where_the_file_system_does_not_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    run(tmp_path / "part", *RISING, "stop_at_step=8")
    monkeypatch.setattr("os.link", refuse)
    run(tmp_path / "other", *RISING, f"resume={tmp_path / 'part'}")
    assert index(tmp_path / "other")["best"] == "step_00000003"


def test_a_checkpoint_in_the_middle_brings_no_later_steps(tmp_path: Path) -> None:
    run(tmp_path / "part", *RISING, "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    run(tmp_path / "other", *RISING, f"resume={tmp_path / 'part/checkpoints/step_00000006'}", "stop_at_step=7")
    assert steps(tmp_path / "other") == list(range(1, 8))
    assert index(tmp_path / "other") == {"last": "step_00000007", "best": "step_00000003"}


def test_a_best_that_was_not_kept_is_said_and_the_best_of_the_kept_ones_counts(tmp_path: Path) -> None:
    run(tmp_path / "part", *RISING, "stop_at_step=8", "checkpoint.keep_best=0", "checkpoint.keep_last=1")
    run(tmp_path / "other", *RISING, f"resume={tmp_path / 'part'}", "quiet=false")
    assert index(tmp_path / "other")["best"] == "step_00000008"
    log = " ".join((tmp_path / "other/train.log").read_text().split())
    assert "its checkpoint was not kept: the best is 1." in log


def test_a_last_step_that_was_saved_before_its_evaluation_can_be_the_best(tmp_path: Path) -> None:
    falling = [key for key in RISING if "maximize" not in key]
    run(tmp_path / "run", *falling, "checkpoint.every_steps=9", "eval.every_epochs=4")
    assert index(tmp_path / "run") == {"last": "step_00000018", "best": "step_00000018"}
