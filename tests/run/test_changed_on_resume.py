"""A resume that silently trains with another key, length or schedule than the run began with is caught here alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainkit
from tests.callbacks.test_tensorboard import read as read_events
from tests.contract.running import CONF, run
from tests.support.results import result_of
from trainkit.cli import main
from trainkit.errors import ConfigError

TINY = ("model=net", "data=points", "optimizer=sgd", "optimizer.lr=0.1", "batch.global_size=16", "batch.micro_size=4")
FLAT = (*TINY, "schedule=constant", "epochs=2")
FALLING = (*TINY, "schedule=cosine", "epochs=2")


def resume(folder: Path, *arguments: str) -> int:
    return main(
        ["resume", "--config-dir", str(CONF), "--allow-package", "tests", str(folder), "quiet=true", *arguments]
    )


@pytest.mark.parametrize("stop", [(), ("stop_at_step=3",)], ids=["ended", "stopped"])
@pytest.mark.slow
def test_a_longer_training_is_that_of_its_length_from_the_start(tmp_path: Path, stop: tuple[str, ...]) -> None:
    whole = run(tmp_path / "whole", *TINY, "schedule=constant", "epochs=4")
    run(tmp_path / "parts", *FLAT, *stop)
    assert resume(tmp_path / "parts", "epochs=4") == 0
    result = result_of(tmp_path / "parts")
    assert (result["weights_sha256"], result["fingerprint"]) == (whole["weights_sha256"], whole["fingerprint"])
    assert result["steps"] == 12
    assert "changes" not in result


@pytest.mark.slow
def test_a_length_in_steps_replaces_one_in_epochs_if_not_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, *FLAT)
    assert resume(tmp_path, "epochs=1") == 2
    assert "epochs=1: gives 3 steps, and" in capsys.readouterr().err
    assert resume(tmp_path, "optimizer=adamw") == 2, "under the name that was given"
    assert "optimizer: sets optimizer._target_=torch.optim.AdamW: the run to resume," in capsys.readouterr().err
    assert resume(tmp_path, "steps=7") == 0
    assert result_of(tmp_path)["steps"] == 7


@pytest.mark.slow
def test_a_new_schedule_needs_its_flag_and_is_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scratch = run(tmp_path / "scratch", *FALLING, "epochs=4")
    run(tmp_path / "run", *FALLING)
    assert resume(tmp_path / "run", "epochs=4") == 2
    errors = capsys.readouterr().err
    assert "  epochs=4: " in errors
    assert "--new-schedule" in errors
    assert resume(tmp_path / "run", "epochs=4", "--new-schedule") == 0
    result = result_of(tmp_path / "run")
    assert (result["steps"], result["changes"]) == (12, ["after step 6: epochs=2 became 4"])
    assert result["fingerprint"] != scratch["fingerprint"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows if row["step"] == 12 and "lr" in row] == [pytest.approx(0.1 * 0.017037, rel=1e-3)]
    assert resume(tmp_path / "run") == 0
    assert result_of(tmp_path / "run")["fingerprint"] == result["fingerprint"]


@pytest.mark.slow
def test_a_run_moves_anywhere_once_it_gives_up_the_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact = (*TINY, "epochs=2", "schedule=constant", "numerics.reproducible=true", "stop_at_step=3")
    run(tmp_path, *exact)
    assert resume(tmp_path, "strategy=fsdp", "strategy.replicas=2") == 2
    assert resume(tmp_path, "numerics.reproducible=false") == 2
    assert capsys.readouterr().err.count("--give-up-reproducible") == 2
    assert resume(tmp_path, "strategy=fsdp", "strategy.replicas=2", "--give-up-reproducible") == 0
    assert result_of(tmp_path)["changes"] == ["after step 3: numerics.reproducible=True became False"]
    notes = json.loads((tmp_path / "environment.json").read_text())["notes"]  # those of the summary on the screen
    assert "from here on the run is not reproducible to the bit" in notes
    assert resume(tmp_path, "strategy=mirrored", "strategy.replicas=2", "epochs=3", "numerics.reproducible=false") == 0
    assert len(result_of(tmp_path)["changes"]) == 1


def edit(folder: Path, **changed: Any) -> None:
    values = yaml.safe_load((folder / "resolved.yaml").read_text())
    values["optimizer"] |= changed
    (folder / "resolved.yaml").write_text(yaml.safe_dump(values))  # another order and format


@pytest.mark.slow
def test_a_key_that_was_edited_by_hand_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", *FLAT, "stop_at_step=3")
    edit(tmp_path / "run", lr=0.5)
    problem = "optimizer.lr=0.5: was changed by hand after the run began with 0.1"
    with pytest.raises(ConfigError, match="was changed by hand"):
        run(tmp_path / "other", *FLAT, "optimizer.lr=0.5", f"resume={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="was changed by hand"):
        trainkit.load(tmp_path / "run", packages=["tests"])
    for removed in ("resolved.yaml.draft", "environment.json", "checkpoints/index.json"):
        other = shutil.copytree(tmp_path / "run", tmp_path / removed.replace("/", "_"))
        (other / removed).unlink(missing_ok=True)
        assert resume(other) == 2
        assert problem in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert resume(tmp_path / "run", "optimizer.lr=0.1") == 2


@pytest.mark.slow
def test_a_file_with_other_comments_order_and_numbers_of_the_same_value_resumes(tmp_path: Path) -> None:
    run(tmp_path, *FLAT, "stop_at_step=3")
    edit(tmp_path, lr=1.0e-1, momentum=0)
    with (tmp_path / "resolved.yaml").open("a") as file:
        file.write("# by me\n")
    assert resume(tmp_path) == 0
    with pytest.raises(ConfigError, match=r"resume_allows=.*has no effect: no run is resumed"):
        run(tmp_path, *FLAT, "resume_allows=[new_schedule]")


# The loss rises, so the first evaluation, at step 3, is the best one.
RISING = (
    "model=net", "data=points", "epochs=6", "optimizer=sgd", "optimizer.lr=0.05", "optimizer.maximize=true",
    "schedule=constant", "batch.global_size=16", "batch.micro_size=8", "eval.metric=val/loss", "log_every_steps=1",
    "logger=[tensorboard]",
)  # fmt: skip


def index(folder: Path) -> dict[str, str]:
    document: dict[str, str] = json.loads((folder / "checkpoints/index.json").read_text())
    return document


def steps(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for line in lines if "train/loss" in (row := json.loads(line))]


@pytest.mark.slow
def test_a_run_continued_in_another_folder_is_the_whole_training(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *RISING)
    run(tmp_path / "part", *RISING, "stop_at_step=8")
    with (tmp_path / "part/metrics.jsonl").open("a") as rows:
        rows.write('{"step": 9, "train/loss": 1.0}\n{"ste')  # a step after the checkpoint, and a truncated one
    other = run(tmp_path / "other", *RISING, f"resume={tmp_path / 'part'}")
    assert index(tmp_path / "other") == index(tmp_path / "whole") == {"last": "step_00000018", "best": "step_00000003"}
    assert (tmp_path / "other/model/best/model.safetensors").is_file()
    assert other["weights_sha256"] == whole["weights_sha256"]
    assert steps(tmp_path / "other") == list(range(1, 19))
    assert [event.step for event in read_events(tmp_path / "other").Scalars("train/loss")] == list(range(1, 19))


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
def test_the_other_folder_is_not_needed_later(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    run(tmp_path / "part", *RISING, "stop_at_step=8")
    if not links:
        monkeypatch.setattr("os.link", refuse)
    run(tmp_path / "other", *RISING, f"resume={tmp_path / 'part'}", "stop_at_step=8")
    shutil.rmtree(tmp_path / "part")
    run(tmp_path / "other", *RISING, "resume=auto")
    assert index(tmp_path / "other")["best"] == "step_00000003"


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_brings_no_later_steps(tmp_path: Path) -> None:
    run(tmp_path / "part", *RISING, "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    run(tmp_path / "other", *RISING, f"resume={tmp_path / 'part/checkpoints/step_00000006'}", "stop_at_step=7")
    assert steps(tmp_path / "other") == list(range(1, 8))
    assert index(tmp_path / "other") == {"last": "step_00000007", "best": "step_00000003"}


@pytest.mark.slow
def test_a_best_that_was_not_kept_is_said_and_the_best_of_the_kept_ones_counts(tmp_path: Path) -> None:
    run(tmp_path / "part", *RISING, "stop_at_step=8", "checkpoint.keep_best=0", "checkpoint.keep_last=1")
    run(tmp_path / "other", *RISING, f"resume={tmp_path / 'part'}", "quiet=false")
    assert index(tmp_path / "other")["best"] == "step_00000008"
    log = " ".join((tmp_path / "other/train.log").read_text().split())
    assert "its checkpoint was not kept: the best is 1." in log
