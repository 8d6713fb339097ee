"""What a resume may change: length, schedule, the guarantee of a reproducible run; and a file edited by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainkit
from tests.contract.running import CONF, run
from trainkit.cli import main
from trainkit.errors import ConfigError

TINY = ("model=net", "data=points", "optimizer=sgd", "optimizer.lr=0.1", "batch.global_size=16", "batch.micro_size=4")
FLAT = (*TINY, "schedule=constant", "epochs=2")
FALLING = (*TINY, "schedule=cosine", "epochs=2")


def resume(folder: Path, *arguments: str) -> int:
    return main(
        ["resume", "--config-dir", str(CONF), "--allow-package", "tests", str(folder), "quiet=true", *arguments]
    )


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.parametrize("stop", [(), ("stop_at_step=3",)], ids=["ended", "stopped"])
def test_a_longer_training_is_that_of_its_length_from_the_start(tmp_path: Path, stop: tuple[str, ...]) -> None:
    whole = run(tmp_path / "whole", *TINY, "schedule=constant", "epochs=4")
    run(tmp_path / "parts", *FLAT, *stop)
    assert resume(tmp_path / "parts", "epochs=4") == 0
    found = result(tmp_path / "parts")
    assert (found["weights_sha256"], found["fingerprint"]) == (whole["weights_sha256"], whole["fingerprint"])
    assert found["steps"] == 12
    assert "changes" not in found


def test_a_length_in_steps_replaces_one_in_epochs(tmp_path: Path) -> None:
    run(tmp_path, *FLAT)
    assert resume(tmp_path, "steps=7") == 0
    assert result(tmp_path)["steps"] == 7


def test_python_trains_longer_in_another_folder(tmp_path: Path) -> None:
    run(tmp_path / "a", *FLAT)
    assert run(tmp_path / "b", *FLAT, "epochs=3", f"resume={tmp_path / 'a'}")["steps"] == 9


def test_a_schedule_of_the_length_needs_the_flag_which_the_error_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, *FALLING)
    assert resume(tmp_path, "steps=12") == 2
    said = capsys.readouterr().err
    assert f"steps=12: the run to resume, {tmp_path}, has epochs=2" in said
    assert "--new-schedule" in said
    assert "1 problem" in said


def test_a_new_schedule_keeps_step_and_optimizer_and_is_labelled(tmp_path: Path) -> None:
    scratch = run(tmp_path / "scratch", *FALLING, "epochs=4")
    run(tmp_path / "run", *FALLING)
    assert resume(tmp_path / "run", "epochs=4", "--new-schedule") == 0
    found = result(tmp_path / "run")
    assert (found["steps"], found["changes"]) == (12, ["after step 6: epochs=2 became 4"])
    assert found["fingerprint"] != scratch["fingerprint"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows if row["step"] == 12 and "lr" in row] == [pytest.approx(0.1 * 0.017037, rel=1e-3)]
    assert resume(tmp_path / "run") == 0
    assert result(tmp_path / "run")["fingerprint"] == found["fingerprint"]


def test_a_run_with_another_schedule_resumes_after_it_was_stopped(tmp_path: Path) -> None:
    run(tmp_path, *FALLING)
    assert resume(tmp_path, "epochs=4", "schedule=constant", "--new-schedule", "stop_at_step=8") == 0
    assert resume(tmp_path) == 0
    assert result(tmp_path)["steps"] == 12
    assert len(result(tmp_path)["changes"]) == 3


def test_a_length_below_the_steps_done_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, *FLAT)
    assert resume(tmp_path, "epochs=1") == 2
    assert "epochs=1: gives 3 steps, and" in capsys.readouterr().err


def test_a_choice_is_refused_under_the_name_that_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, *FLAT)
    assert resume(tmp_path, "optimizer=adamw") == 2
    said = capsys.readouterr().err
    assert "optimizer: sets optimizer._target_=torch.optim.AdamW: the run to resume," in said
    assert "1 problem" in said


def test_a_reproducible_run_moves_to_any_strategy_when_the_guarantee_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = (*TINY, "epochs=2", "schedule=constant", "numerics.reproducible=true", "stop_at_step=3")
    run(tmp_path, *exact)
    assert resume(tmp_path, "strategy=fsdp", "strategy.replicas=2") == 2
    assert resume(tmp_path, "numerics.reproducible=false") == 2
    assert capsys.readouterr().err.count("--give-up-reproducible") == 2
    assert resume(tmp_path, "strategy=fsdp", "strategy.replicas=2", "--give-up-reproducible") == 0
    assert result(tmp_path)["changes"] == ["after step 3: numerics.reproducible=True became False"]
    notes = json.loads((tmp_path / "environment.json").read_text())["notes"]  # those of the summary on the screen
    assert "from here on the run is not reproducible to the bit" in notes
    assert resume(tmp_path, "strategy=mirrored", "strategy.replicas=2", "epochs=3", "numerics.reproducible=false") == 0
    assert len(result(tmp_path)["changes"]) == 1


def edit(folder: Path, **changed: Any) -> None:
    values = yaml.safe_load((folder / "resolved.yaml").read_text())
    values["optimizer"] |= changed
    (folder / "resolved.yaml").write_text(yaml.safe_dump(values))  # another order and format


@pytest.mark.parametrize("removed", ["", "environment.json", "checkpoints"])
def test_a_key_that_was_edited_by_hand_is_refused_by_name(
    tmp_path: Path, removed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, *FLAT, "stop_at_step=3")
    edit(tmp_path, lr=0.5)
    if removed:
        (shutil.rmtree if removed == "checkpoints" else Path.unlink)(tmp_path / removed)
    assert resume(tmp_path) == 2
    assert resume(tmp_path, "optimizer.lr=0.1") == 2
    said = capsys.readouterr().err
    assert (
        said.count("optimizer.lr=0.5: was changed by hand after the run began with 0.1. Set it back in the file.") == 2
    )


def test_an_edited_run_is_refused_from_python_and_by_those_who_use_its_model(tmp_path: Path) -> None:
    run(tmp_path / "run", *FLAT, "stop_at_step=3")
    edit(tmp_path / "run", lr=0.5)
    with pytest.raises(ConfigError, match="was changed by hand"):
        run(tmp_path / "other", *FLAT, "optimizer.lr=0.5", f"resume={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="was changed by hand"):
        trainkit.load(tmp_path / "run", packages=["tests"])


def test_a_file_with_other_comments_order_and_numbers_of_the_same_value_resumes(tmp_path: Path) -> None:
    run(tmp_path, *FLAT, "stop_at_step=3")
    edit(tmp_path, lr=1.0e-1, momentum=0)
    with (tmp_path / "resolved.yaml").open("a") as file:
        file.write("# by me\n")
    assert resume(tmp_path) == 0


def test_permission_to_change_without_a_run_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume_allows=.*has no effect: no run is resumed"):
        run(tmp_path, *FLAT, "resume_allows=[new_schedule]")
