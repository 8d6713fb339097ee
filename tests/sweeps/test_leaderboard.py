from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.schema import MonitoredMetric
from trainkit.config.yaml_files import with_config_dirs
from trainkit.sweeps.results.job_results import read_entry, varied_overrides
from trainkit.sweeps.results.leaderboard import Leaderboard, collect, write

ACCURACY = MonitoredMetric(metric="val/accuracy", mode="max")


def made(
    root: Path,
    name: str,
    *,
    accuracy: float | None = None,
    status: str = "finished",
    seconds: float | None = 6.13,
    eval_keys: str = "{metric: val/accuracy}",
) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    metrics = {} if accuracy is None else {"val/accuracy": accuracy, "val/loss": None}
    result = {"status": status, "metrics": metrics, "seconds": seconds}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "resolved.yaml").write_text(f"eval: {eval_keys}\n")
    return folder


def board_of(root: Path) -> Leaderboard:
    made(root, "0", accuracy=0.9)
    made(root, "1", accuracy=0.98123)
    made(root, "2", status="failed", seconds=None)
    entries = [
        read_entry(root / "0", job="0", overrides=["strategy=mirrored", "optimizer.lr=0.01"]),
        read_entry(root / "1", job="1", overrides=["strategy=mirrored", "optimizer.lr=0.003"]),
        read_entry(root / "2", job="2", overrides=["strategy=one_device", "clip.max_norm=1"], exit_code=1),
        read_entry(root / "3", job="3", overrides=["strategy=one_device"], exit_code=None),
    ]
    return Leaderboard.of(entries, ACCURACY)


def test_the_table_has_the_best_first_and_the_failed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert board_of(Path("sweep")).lines() == [
        "#  job  status    val/accuracy  overrides                             time   folder",
        "1  1    finished  0.9812        strategy=mirrored optimizer.lr=0.003  6.1 s  sweep/1",
        "2  0    finished  0.9           strategy=mirrored optimizer.lr=0.01   6.1 s  sweep/0",
        "3  2    failed                  strategy=one_device clip.max_norm=1          sweep/2",
        "4  3    not run                 strategy=one_device",
    ]


def test_the_page_links_every_folder(tmp_path: Path) -> None:
    assert board_of(tmp_path).top(2).markdown(base=tmp_path) == (
        "# Leaderboard by val/accuracy (max)\n"
        "\n"
        "2 jobs, 2 finished.\n"
        "\n"
        "| # | job | status | val/accuracy | overrides | time | folder |\n"
        "|--:|:----|:-------|----:|:----------|----:|:-------|\n"
        "| 1 | 1 | finished | 0.9812 | `strategy=mirrored optimizer.lr=0.003` | 6.1 s | [1](1) |\n"
        "| 2 | 0 | finished | 0.9 | `strategy=mirrored optimizer.lr=0.01` | 6.1 s | [0](0) |\n"
    )


def test_the_csv_has_full_precision_and_a_column_for_every_swept_key(tmp_path: Path) -> None:
    assert board_of(tmp_path).csv(base=tmp_path) == (
        "rank,job,status,val/accuracy,strategy,optimizer.lr,clip.max_norm,steps,seconds,folder\n"
        "1,1,finished,0.98123,mirrored,0.003,,,6.13,1\n"
        "2,0,finished,0.9,mirrored,0.01,,,6.13,0\n"
        "3,2,failed,,one_device,,1,,,2\n"
        "4,3,not run,,one_device,,,,,3\n"
    )


def test_less_is_better_where_the_metric_says_so(tmp_path: Path) -> None:
    entries = board_of(tmp_path).entries
    least = Leaderboard.of(entries, MonitoredMetric(metric="val/accuracy", mode="min"))
    assert [entry.job for entry in least.entries] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("code", "status"), [(0, "no result"), (2, "exit 2"), (-9, "signal 9"), (None, "not run")])
def test_the_status_of_a_job_without_a_result_comes_from_its_exit_code(
    tmp_path: Path, code: int | None, status: str
) -> None:
    assert read_entry(tmp_path, job="0", exit_code=code).status == status


def test_a_job_whose_process_failed_has_its_exit_code_as_status_despite_a_finished_result(tmp_path: Path) -> None:
    assert read_entry(made(tmp_path, "0", accuracy=0.9), job="0", exit_code=1).status == "exit 1"


def test_the_overrides_are_those_that_not_every_job_has() -> None:
    assert varied_overrides([["a=1", "b=1"], ["a=1", "b=2"], ["a=1"]]) == [("b=1",), ("b=2",), ()]
    assert varied_overrides([]) == []


def test_runs_of_any_folder_are_collected_by_what_they_go_by(tmp_path: Path) -> None:
    made(tmp_path, "digits/a", accuracy=0.5)
    made(tmp_path, "digits/b", accuracy=0.75)
    board = collect(tmp_path)
    assert str(board.goal) == "val/accuracy (max)"
    assert [(entry.job, entry.metrics) for entry in board.entries] == [
        ("digits/b", {"val/accuracy": 0.75}),
        ("digits/a", {"val/accuracy": 0.5}),
    ]


def test_an_empty_folder_has_an_empty_leaderboard(tmp_path: Path) -> None:
    board = collect(tmp_path)
    write(board, tmp_path)
    assert board.entries == ()
    assert (tmp_path / "leaderboard.csv").read_text() == "rank,job,status,val/loss,steps,seconds,folder\n"
    assert not (tmp_path / "leaderboard.png").exists()


def test_the_three_files_are_written(tmp_path: Path) -> None:
    write(board_of(tmp_path), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("leaderboard.*")) == [
        "leaderboard.csv",
        "leaderboard.md",
        "leaderboard.png",
    ]


def row(
    root: Path,
    name: str,
    accuracy: float | None,
    *,
    loss: float = 1.0,
    steps: int = 9,
    status: str = "finished",
    reason: str = "",
) -> dict[str, Any]:
    folder = root / name
    folder.mkdir()
    metrics = {"val/accuracy": accuracy, "val/loss": loss}
    result = {"status": status, "reason": reason, "metrics": metrics, "steps": steps, "seconds": 1}
    (folder / "result.json").write_text(json.dumps(result))
    return {"job": name, "folder": name, "overrides": ["epochs=1", f"seed={name}"], "exit_code": 0}


def swept_folder(root: Path, rows: Sequence[dict[str, Any]]) -> Leaderboard:
    (root / "sweep.json").write_text(json.dumps({"jobs": rows}))
    return collect(root, ACCURACY)


def test_pruned_jobs_follow_finished_ones_and_failed_ones_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        row(tmp_path, "0", 0.5),
        row(tmp_path, "1", 0.9, steps=3, status="stopped", reason="stop_at_step=3"),
        row(tmp_path, "2", 0.8, steps=4, status="stopped") | {"exit_code": 130, "pruned": True},
        row(tmp_path, "3", 0.7, steps=2, status="failed") | {"exit_code": 1},
    ]
    board = swept_folder(tmp_path, rows)
    assert [(entry.job, entry.status, entry.steps) for entry in board.entries] == [
        ("0", "finished", 9),
        ("1", "pruned", 3),
        ("2", "pruned", 4),
        ("3", "failed", 2),
    ]
    assert board.counts() == "4 jobs, 1 finished, 2 pruned, 1 failed"
    assert board.lines()[0] == "#  job  status    val/accuracy  steps  overrides  time   folder"
    assert board.markdown(base=tmp_path).splitlines()[7] == "| 2 | 1 | pruned | 0.9 | 3 | `seed=1` | 1.0 s | [1](1) |"


def test_a_job_that_was_asked_to_stop_there_is_not_pruned(tmp_path: Path) -> None:
    only = row(tmp_path, "0", 0.5, steps=3, status="stopped", reason="stop_at_step=3")
    only["overrides"].append("stop_at_step=3")
    assert [entry.status for entry in swept_folder(tmp_path, [only]).entries] == ["stopped"]


def test_equal_figures_are_ordered_by_loss_and_then_by_number(tmp_path: Path) -> None:
    rows = [row(tmp_path, "0", 0.5, loss=2.0), row(tmp_path, "1", 0.5), row(tmp_path, "2", 0.5)]
    assert [entry.job for entry in swept_folder(tmp_path, rows).entries] == ["1", "2", "0"]


def test_the_page_ends_with_the_commands_for_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.config.targets.allowed._OPENED", Counter())  # the tests allow themselves
    best = row(tmp_path, "0", 0.5) | {"overrides": ["callbacks=[]", "sweep.name=rates", "seed=3"]}
    board = swept_folder(tmp_path, [best])
    assert board.commands(Path("rates")) == [
        ("the best run again", "trainkit 'callbacks=[]' seed=3"),
        ("the best on all devices", "trainkit top rates --k 1 --then strategy=mirrored"),
    ]
    assert "The best run again:\n\n```bash\ntrainkit 'callbacks=[]' seed=3\n```\n" in board.markdown(base=tmp_path)


def test_the_commands_for_the_best_allow_the_packages_of_this_process(tmp_path: Path) -> None:
    best = row(tmp_path, "0", 0.5) | {"overrides": ["seed=3"]}
    assert swept_folder(tmp_path, [best]).commands(Path("rates")) == [
        ("the best run again", "trainkit --allow-package tests seed=3"),
        ("the best on all devices", "trainkit top --allow-package tests rates --k 1 --then strategy=mirrored"),
    ]


def test_the_commands_for_the_best_name_the_folders_of_the_user(tmp_path: Path) -> None:
    best = row(tmp_path, "0", 0.5) | {"overrides": ["seed=3"]}
    with with_config_dirs([Path("/srv/my conf")]):
        (_, again), (_, then) = swept_folder(tmp_path, [best]).commands(Path("rates"))
    assert again == "trainkit --config-dir '/srv/my conf' --allow-package tests seed=3"
    assert then.startswith("trainkit top --config-dir '/srv/my conf' --allow-package tests rates ")


def test_without_a_figure_there_is_nothing_to_run_again(tmp_path: Path) -> None:
    assert swept_folder(tmp_path, [row(tmp_path, "0", None)]).commands(Path("rates")) == []


def test_tensorboard_gets_the_settings_of_jobs_that_write_for_it(tmp_path: Path) -> None:
    rows = [row(tmp_path, "0", 0.5), row(tmp_path, "1", 0.5)]
    (tmp_path / "0/tensorboard").mkdir()
    write(swept_folder(tmp_path, rows), tmp_path)
    assert [path.parent.parent.name for path in tmp_path.rglob("*.hparams")] == ["0"]
