"""The order of runs, their tables, and `trainkit top`.

A pruned job that is ranked above a finished one, or a mean over folds that lacks a fold, is caught here alone.
Ensembles of runs: logits that are averaged in place of probabilities, or stale batch statistics, are caught here.
What a running sweep shows: a share of a job that stops early, told as one of its whole length, is caught here.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch import nn

import trainkit
from tests.support.results import result_of
from tests.support.second_device import META, SecondDevice
from trainkit.config.resume import compose_anew
from trainkit.config.schema import MonitoredMetric
from trainkit.config.yaml_files import with_config_dirs
from trainkit.errors import CheckpointError, ConfigError
from trainkit.models.ensemble import Ensemble
from trainkit.numerics.precision import Precision
from trainkit.sweeps.results.ensemble import best_of
from trainkit.sweeps.results.job_results import MetricRows, read_entry
from trainkit.sweeps.results.leaderboard import Leaderboard, collect, write
from trainkit.sweeps.screen import JobLine, State, View, table_of
from trainkit.verbs.looking import top
from trainkit.verbs.support.call import Call
from trainkit.verbs.using import ensemble as verb
from trainkit.watching.board import WatchedRun

ACCURACY = MonitoredMetric(metric="val/accuracy", mode="max")


def write_run(root: Path, name: str, **result: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    accuracy = result.pop("accuracy", None)
    metrics = {} if accuracy is None else {"val/accuracy": accuracy, "val/loss": result.pop("loss", None)}
    content = {"status": "finished", "metrics": metrics, "seconds": 6.13} | result
    (folder / "result.json").write_text(json.dumps(content))
    (folder / "resolved.yaml").write_text("eval: {metric: val/accuracy}\n")
    return folder


def row(root: Path, name: str, accuracy: float | None, **result: Any) -> dict[str, Any]:
    write_run(root, name, accuracy=accuracy, **result)
    return {"job": name, "folder": name, "overrides": ["epochs=1", f"clip.max_norm={name}"], "exit_code": 0}


def swept(root: Path, rows: Sequence[dict[str, Any]]) -> Leaderboard:
    (root / "sweep.json").write_text(json.dumps({"jobs": rows}))
    return collect(root, ACCURACY)


def board_of(root: Path) -> Leaderboard:
    write_run(root, "0", accuracy=0.9)
    write_run(root, "1", accuracy=0.98123)
    write_run(root, "2", status="failed", seconds=None)
    entries = [
        read_entry(root / "0", job="0", overrides=["strategy=mirrored", "optimizer.lr=0.01"]),
        read_entry(root / "1", job="1", overrides=["strategy=mirrored", "optimizer.lr=0.003"]),
        read_entry(root / "2", job="2", overrides=["strategy=one_device", "clip.max_norm=1"], exit_code=1),
        read_entry(root / "3", job="3", overrides=["strategy=one_device"], exit_code=None),
    ]
    return Leaderboard.of(entries, ACCURACY)


def test_the_table_has_the_best_first_and_the_failed_last(cwd: Path) -> None:
    board = board_of(Path("sweep"))
    assert board.lines() == [
        "#  job  status    val/accuracy  overrides                             time   folder",
        "1  1    finished  0.9812        strategy=mirrored optimizer.lr=0.003  6.1 s  sweep/1",
        "2  0    finished  0.9           strategy=mirrored optimizer.lr=0.01   6.1 s  sweep/0",
        "3  2    failed                  strategy=one_device clip.max_norm=1          sweep/2",
        "4  3    not run                 strategy=one_device",
    ]
    least = Leaderboard.of(board.entries, MonitoredMetric(metric="val/accuracy", mode="min"))
    assert [entry.job for entry in least.entries] == ["0", "1", "2", "3"]


def test_the_files_have_links_and_a_column_for_every_swept_key(tmp_path: Path) -> None:
    board = board_of(tmp_path)
    write(board, tmp_path)
    assert board.top(1).markdown(base=tmp_path).splitlines()[4:] == [
        "| # | job | status | val/accuracy | overrides | time | folder |",
        "|--:|:----|:-------|----:|:----------|----:|:-------|",
        "| 1 | 1 | finished | 0.9812 | `strategy=mirrored optimizer.lr=0.003` | 6.1 s | [1](1) |",
    ]
    assert (tmp_path / "leaderboard.csv").read_text() == (
        "rank,job,status,val/accuracy,strategy,optimizer.lr,clip.max_norm,steps,seconds,folder\n"
        "1,1,finished,0.98123,mirrored,0.003,,,6.13,1\n"
        "2,0,finished,0.9,mirrored,0.01,,,6.13,0\n"
        "3,2,failed,,one_device,,1,,,2\n"
        "4,3,not run,,one_device,,,,,3\n"
    )


def test_the_exit_code_of_a_process_says_what_its_result_does_not(tmp_path: Path) -> None:
    codes = {0: "no result", 2: "exit 2", -9: "signal 9", None: "not run"}
    assert {code: read_entry(tmp_path, job="0", exit_code=code).status for code in codes} == codes
    assert read_entry(write_run(tmp_path, "0", accuracy=0.9), job="0", exit_code=1).status == "exit 1"


def test_pruned_jobs_follow_finished_ones_and_failed_ones_both(tmp_path: Path) -> None:
    rows = [
        row(tmp_path, "0", 0.5, steps=9),
        row(tmp_path, "1", 0.9, steps=3, status="stopped", reason="stop_at_step=3"),
        row(tmp_path, "2", 0.8, steps=4, status="stopped") | {"exit_code": 130, "pruned": True},
        row(tmp_path, "3", 0.7, steps=2, status="failed") | {"exit_code": 1},
    ]
    board = swept(tmp_path, rows)
    assert [(entry.job, entry.status, entry.steps) for entry in board.entries] == [
        ("1", "stopped", 3), ("0", "finished", 9), ("2", "pruned", 4), ("3", "failed", 2),
    ]  # fmt: skip
    assert board.counts() == "4 jobs, 1 stopped, 1 finished, 1 pruned, 1 failed"
    assert board.lines()[0].split()[:5] == ["#", "job", "status", "val/accuracy", "steps"]


def test_equal_figures_are_ordered_by_loss_and_then_by_number(tmp_path: Path) -> None:
    rows = [row(tmp_path, "0", 0.5, loss=2.0), row(tmp_path, "1", 0.5, loss=1.0), row(tmp_path, "2", 0.5, loss=1.0)]
    assert [entry.job for entry in swept(tmp_path, rows).entries] == ["1", "2", "0"]


def test_the_page_ends_with_the_commands_for_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = row(tmp_path, "0", 0.5) | {"overrides": ["callbacks=[]", "sweep.name=rates", "seed=3"]}
    board = swept(tmp_path, [best])
    with with_config_dirs([Path("/srv/my conf")]):
        (_, again), (_, then) = board.commands(Path("rates"))
    assert again == "trainkit --config-dir '/srv/my conf' --allow-package tests -m 'callbacks=[]' 'seed=range(4)'"
    assert then.startswith("trainkit top --config-dir '/srv/my conf' --allow-package tests rates ")
    monkeypatch.setattr("trainkit.config.targets.allowed._OPENED", Counter())  # the tests allow themselves
    assert [command for _, command in board.commands(Path("rates"))] == [
        "trainkit -m 'callbacks=[]' 'seed=range(4)'",
        "trainkit top rates --k 1 --then strategy=mirrored",
    ]
    text = "The best point with other seeds:\n\n```bash\ntrainkit -m 'callbacks=[]' 'seed=range(4)'\n```\n"
    assert text in board.markdown(base=tmp_path)
    assert swept(tmp_path, [row(tmp_path, "1", None)]).commands(Path("rates")) == []


def test_tensorboard_gets_the_settings_of_jobs_that_write_for_it(tmp_path: Path) -> None:
    rows = [row(tmp_path, "0", 0.5), row(tmp_path, "1", 0.5)]
    (tmp_path / "0/tensorboard").mkdir()
    write(swept(tmp_path, rows), tmp_path)
    assert [path.parent.parent.name for path in tmp_path.rglob("*.hparams")] == ["0"]


def folded(root: Path, accuracies: Sequence[float | None]) -> Leaderboard:
    """A sweep over two rates, three folds each."""
    points = [(rate, fold) for rate in ("0.1", "0.2") for fold in range(3)]
    rows = []
    for number, ((rate, fold), accuracy) in enumerate(zip(points, accuracies, strict=True)):
        if accuracy is not None:
            write_run(root, str(number), accuracy=accuracy, seconds=2.0)
        keys = ["epochs=1", f"optimizer.lr={rate}", "cv.folds=3", f"cv.fold={fold}"]
        code = 0 if accuracy is not None else 1
        rows.append({"job": str(number), "folder": str(number), "overrides": keys, "exit_code": code})
    return swept(root, rows)


def test_points_are_ranked_by_the_mean_over_their_folds(tmp_path: Path) -> None:
    board = folded(tmp_path, [0.5, 0.6, 0.7, 0.95, 0.4, 0.6])
    best, other = board.entries
    assert (best.job, best.overrides, best.status, best.seconds) == ("3-5", ("optimizer.lr=0.2",), "finished", 6.0)
    assert [board.value(best), board.value(other)] == pytest.approx([0.65, 0.6])
    assert best.spread["val/accuracy"] == pytest.approx(math.sqrt((0.3**2 + 0.25**2 + 0.05**2) / 2))
    assert board.lines()[1].split("  ")[3] == "0.65 ± 0.2784, n = 3"
    assert board.csv(base=tmp_path).splitlines()[0] == (
        "rank,job,status,val/accuracy,val/accuracy spread,optimizer.lr,steps,seconds,folder"
    )


def test_a_point_that_lacks_a_fold_is_not_compared(tmp_path: Path) -> None:
    board = folded(tmp_path, [0.1, 0.1, 0.1, 0.9, None, 0.9])
    assert [(entry.job, entry.status, board.value(entry)) for entry in board.entries] == [
        ("0-2", "finished", pytest.approx(0.1)),
        ("3-5", "2 of 3 folds, exit 1", None),
    ]


def seeded(root: Path, losses: Mapping[str, Sequence[float | None]], *more: str) -> Leaderboard:
    """A sweep over rates, each with the losses of its seeds; None: the job has failed."""
    rows = list[dict[str, Any]]()
    for rate, values in losses.items():
        for seed, loss in enumerate(values):
            name = str(len(rows))
            failed = {"status": "failed"} if loss is None else {}
            write_run(root, name, accuracy=0.5, loss=loss, **failed)
            keys = ["steps=9", f"clip.max_norm={rate}", *more, f"seed={seed}"]
            rows.append({"job": name, "folder": name, "overrides": keys, "exit_code": int(loss is None)})
    (root / "sweep.json").write_text(json.dumps({"jobs": rows}))
    return collect(root)


def test_seeds_are_repeats_of_a_point_that_is_ranked_by_its_mean_loss(tmp_path: Path) -> None:
    board = seeded(tmp_path, {"0.1": [0.1, 0.7], "0.2": [0.3, 0.3], "0.3": [0.05, None]})
    assert str(board.goal) == "val/loss (min)"  # eval.metric is the accuracy, which is shown too
    assert [(entry.job, entry.status, round(board.value(entry) or 0, 3)) for entry in board.entries] == [
        ("2-3", "finished", 0.3), ("0-1", "finished", 0.4), ("4-5", "1 of 2 runs, failed", 0.05),
    ]  # fmt: skip
    (_, again), _ = board.commands(tmp_path)
    assert again == "trainkit --allow-package tests -m steps=9 clip.max_norm=0.2 seed=0,1"  # no lucky seed


def test_a_failed_seed_of_one_fold_leaves_the_point_its_other_seeds(tmp_path: Path) -> None:
    (entry,) = seeded(tmp_path, {"0.1": [0.2, None, 0.4]}, "cv.folds=5", "cv.fold=2").entries
    assert entry.status == "2 of 3 runs, failed"
    assert entry.metrics["val/loss"] == pytest.approx(0.3)


def test_the_board_says_which_points_may_be_best_and_which_are_worse(tmp_path: Path) -> None:
    noise = [0.0, 0.01, -0.01, 0.005, -0.005]
    losses = {"0.1": [0.50003 + change for change in noise], "0.2": [0.501 - change for change in noise]}
    board = seeded(tmp_path, {**losses, "0.3": [0.90003 + 0.9 * change for change in noise]})
    assert board.verdict() == [
        "may be best: clip.max_norm=0.1, clip.max_norm=0.2 (5 seeds)",
        "clip.max_norm=0.3 worse than clip.max_norm=0.1 by 0.4 [0.3976, 0.4024]",
    ]
    assert "may be best: clip.max_norm=0.1, clip.max_norm=0.2 (5 seeds).\n" in board.markdown(base=tmp_path)


def test_a_search_and_runs_without_a_loss_are_ranked_by_their_own_metric(tmp_path: Path) -> None:
    seeded(tmp_path, {"0.1": [0.1], "0.2": [0.3]})
    (tmp_path / "optuna.db").touch()
    assert str(collect(tmp_path).goal) == "val/accuracy (max)"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One fold of a training, ended early: what a search may leave."""
    root = tmp_path_factory.mktemp("sweep")
    keys = ("recipe=null", "epochs=1", "cv.folds=3", "cv.fold=1", "stop_at_step=4", "callbacks=[]", "logger=[]")
    trainkit.train(trainkit.compose([*keys, "quiet=true"]), run_dir=root / "0")
    return root


def called(folder: object, *overrides: str, **flags: Any) -> int:
    return top.run(Call(verb="top", arguments=(str(folder),), flags=flags, overrides=overrides))


def test_the_best_runs_are_printed_by_their_metric_or_another(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, accuracy in [("a", 0.5), ("b", 0.75), ("c", 0.25), ("d", 0.5)]:
        write_run(cwd / "runs", name, accuracy=accuracy)
    assert called("runs", k=2) == 0
    assert capsys.readouterr().out == (
        "2 of 4 runs by val/accuracy (max)\n"
        "#  job  status    val/accuracy  overrides  time   folder\n"
        "1  b    finished  0.75                     6.1 s  runs/b\n"
        "2  a    finished  0.5                      6.1 s  runs/a\n"
    )
    called("runs", metric="val/accuracy", mode="min")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("1  c ")
    assert lines[-1].startswith("equal val/accuracy: the lower val/loss comes first")


def test_a_choice_by_the_test_split_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "a", metrics={"test/accuracy": 0.5})
    called(tmp_path, metric="test/accuracy")
    assert capsys.readouterr().out.splitlines()[-1].startswith("test/accuracy selected the runs here")


def test_what_top_cannot_do_is_refused_by_its_flag(stopped: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "a", "0", accuracy=0.5)
    write_run(tmp_path / "failed", "0", status="failed")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[object, tuple[str, ...], dict[str, Any], str]] = [
        ("absent", (), {}, "is not a folder"),
        (tmp_path / "empty", (), {}, "contains no run"),
        (tmp_path / "a", (), {"mode": "max"}, "--mode: has no effect"),
        (tmp_path / "a", (), {"metric": "val/f1"}, "There are: val/accuracy."),
        (stopped, (), {"k": 2, "then": True}, "--k 2: --then"),
        (stopped, ("seed=1",), {}, "takes no key=value"),
        (tmp_path / "failed", (), {"then": ""}, "there is no best run"),
    ]
    for folder, overrides, flags, text in cases:
        with pytest.raises(ConfigError) as caught:
            called(folder, *overrides, **flags)
        assert text in str(caught.value)


@pytest.mark.slow
def test_the_best_is_trained_anew_whole_and_on_all_samples(
    stopped: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(stopped, "optimizer.lr=0.003", "hydra.run.dir=again", k=1, then=True) == 0
    result = result_of(cwd / "again")
    assert (result["status"], result["steps"], result["samples"]) == ("finished", 23, 1437)
    assert f"the config of {stopped}/0 optimizer.lr=0.003" in capsys.readouterr().out
    assert result_of(stopped / "0")["steps"] == 4


def test_what_was_auto_follows_what_is_changed(stopped: Path) -> None:
    anew = compose_anew(stopped / "0", ["strategy=mirrored", "strategy.replicas=2"])
    assert anew.cfg.batch.micro_size is None  # that of one device, 64, would leave the second nothing to do
    assert (anew.cfg.cv.folds, anew.cfg.stop_at_step, anew.run_dir_given) == (None, None, False)
    assert anew.notes[-1].endswith("is left out: no fold is held out of this training")


RUN = ("recipe=null", "epochs=1", "model.batch_norm=true", "callbacks=[]", "logger=[]", "quiet=true")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on digits that differ in their seed, and one of a wider model."""
    root = tmp_path_factory.mktemp("sweep")
    for name, more in [("0", "seed=1"), ("1", "seed=2"), ("2", "model.hidden=[32]")]:
        trainkit.train(trainkit.compose([*RUN, "eval.metric=val/accuracy", more]), run_dir=root / name)
    return root


@pytest.fixture(scope="module")
def two(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two of one shape, and their ensemble."""
    root = tmp_path_factory.mktemp("two")
    for name in ("0", "1"):
        shutil.copytree(runs / name, root / name)
    combined(root, k=2)
    return root


def combined(folder: Path, **flags: Any) -> int:
    return verb.run(Call(verb="ensemble", arguments=(str(folder),), flags=flags))


def figures(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((folder / "model.yaml").read_text())["figures"]
    return document


@pytest.mark.slow
def test_members_are_scored_as_they_were_in_training_and_the_ensemble_beside_them(
    two: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched: list[tuple[str, str]] = []
    monkeypatch.setattr(Precision, "apply_globally", lambda self, kind: switched.append((self.value, kind)))
    assert combined(two, k=2, checkpoint="best") == 0
    scores = figures(two / "ensemble-2")  # the earlier one is left alone
    assert list(scores)[2:] == ["ensemble of 2", "averaged weights"]
    assert switched == [("fp32", "cpu")]
    for name in ("0", "1"):
        result = result_of(two / name)["metrics"]
        # sums of 360 samples in batches of other sizes: a few units in the last place of float32
        assert scores[f"job {name}"]["val/loss"] == pytest.approx(result["val/loss"], rel=1e-6)
        assert scores[f"job {name}"]["val/accuracy"] == result["val/accuracy"]
    assert scores["ensemble of 2"]["val/loss"] < max(scores[f"job {name}"]["val/loss"] for name in "01")
    assert "| ensemble of 2 |" in (two / "ensemble-2/ensemble.md").read_text()
    assert f'trainkit.load("{two}/ensemble-2")' in capsys.readouterr().out


def test_the_written_model_is_loaded_as_one_and_gives_the_mean_of_probabilities(two: Path) -> None:
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    joined = trainkit.load(two / "ensemble")
    members = [trainkit.load(two / name)(images).softmax(-1) for name in ("0", "1")]
    torch.testing.assert_close(joined(images).exp(), sum(members) / 2)
    assert not joined.training


def test_averaged_weights_are_the_mean_and_their_batch_statistics_are_counted_anew(two: Path) -> None:
    averaged = trainkit.load(two / "ensemble/averaged").state_dict()
    members = [trainkit.load(two / name).state_dict() for name in ("0", "1")]
    for name, tensor in averaged.items():
        mean = (members[0][name].double() + members[1][name].double()) / 2
        if "running" in name:
            assert not torch.allclose(tensor.double(), mean, rtol=1e-3)
        elif tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)


def test_models_of_other_shapes_have_no_mean_of_weights(runs: Path, tmp_path: Path) -> None:
    combined(runs, out=str(tmp_path / "made"))
    assert "averaged weights" not in figures(tmp_path / "made")
    assert not (tmp_path / "made/averaged").exists()


def test_damaged_weights_and_a_class_that_nobody_allowed_are_not_loaded(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "ensemble", ensemble := tmp_path / "ensemble")
    file, config = ensemble / "model.safetensors", ensemble / "model.yaml"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
        trainkit.load(ensemble)
    file.write_bytes(content)
    config.write_text(config.read_text().replace("trainkit.models.Mlp", "os.system"))
    with pytest.raises(ConfigError, match=r"model\.members\.0\._target_=os\.system"):
        trainkit.load(ensemble)
    with pytest.raises(ConfigError, match="holds no model"):
        trainkit.load(tmp_path)


def test_what_cannot_be_combined_is_refused(runs: Path, two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, other := tmp_path / "other")
    for file, unit in (("resolved.yaml", "scaling: unit"), ("environment.json", '"scaling": "unit"')):
        text = (other / "1" / file).read_text()
        assert unit in text
        (other / "1" / file).write_text(text.replace(unit, unit.replace("unit", "standard")))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (runs, {"k": 4}, "--k 4: only 3 runs there have val/loss"),
        (runs, {"k": 1}, "--k 1: "),
        (other, {"k": 2}, "scored on the same samples"),
    ]
    for folder, flags, text in cases:
        with pytest.raises(ConfigError) as caught:
            combined(folder, **flags)
        assert text in str(caught.value)


def test_folds_are_no_members(tmp_path: Path) -> None:
    entries = [read_entry(tmp_path, job=fold, arguments=[f"cv.fold={fold}"], exit_code=None) for fold in "01"]
    folds = [replace(entry, metrics={"val/loss": 1.0}) for entry in entries]
    with pytest.raises(ConfigError, match="its runs are folds"):
        best_of(Leaderboard.of(folds, MonitoredMetric(metric="val/loss", mode="min")), 2)


def test_probabilities_are_averaged_not_scores() -> None:
    sure, unsure = torch.tensor([[20.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    members = [_Constant(sure), _Constant(unsure)]
    expected = (sure.softmax(-1) + unsure.softmax(-1)) / 2
    torch.testing.assert_close(Ensemble(members=members)(None).exp(), expected)
    assert Ensemble(members=members, combine="outputs")(None).tolist() == [[10.0, 0.5]]


def test_scores_of_sixteen_bits_are_averaged_in_thirty_two() -> None:
    narrow = Ensemble(members=[_Constant(torch.zeros(1, 3, dtype=torch.bfloat16))] * 3)(None)
    assert narrow.dtype == torch.float32
    assert narrow[0, 0].item() == pytest.approx(-math.log(3), rel=1e-6)


def test_every_member_computes_on_a_device_of_its_own() -> None:
    with SecondDevice():
        model = Ensemble(members=[nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 3)])
        model.spread([torch.device("cpu"), META])
        assert [next(member.parameters()).device.type for member in model.members] == ["cpu", "meta", "cpu"]
        assert model(torch.ones(4, 2)).device.type == "cpu"


class _Constant(nn.Module):
    outputs: torch.Tensor

    def __init__(self, outputs: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("outputs", outputs)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.outputs


def shown(view: View, height: int = 20) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=80, highlight=False).print(table_of(view, height=height))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def lines(*states: State) -> list[JobLine]:
    return [JobLine(name=str(number), label=f"seed={number}", state=state) for number, state in enumerate(states)]


def progress(step: int, remaining_s: float | None, metrics: dict[str, float]) -> WatchedRun:
    return WatchedRun(
        folder="", name="", state="", note="", step=step, last_step=6000, remaining_s=remaining_s, samples_per_s=None,
        metrics=metrics, updated=None,
    )  # fmt: skip


def test_the_table_tells_how_far_each_job_is() -> None:
    running, done = lines("running", "done")
    running.progress = progress(1500, 75.0, {"val/accuracy": 0.9123456, "train/loss": 0.3})
    done.progress, done.seconds = progress(6000, None, {"val/accuracy": 0.95, "train/loss": 0.1}), 8.0
    view = View(lines=[running, done], queued=6, in_use=1, slots=2, metric="val/accuracy")
    assert shown(view) == [
        "1 done, 1 running, 6 queued, 1 of 2 slots in use",
        "job  state           step  val/accuracy  loss   left  overrides",
        "0    running  1,500  25 %        0.9123   0.3   1:15  seed=0",
        "1    done     6,000 100 %          0.95   0.1  8.0 s  seed=1",
    ]


def test_where_there_is_little_room_those_that_run_and_that_failed_are_shown() -> None:
    view = View(lines=lines("done", "failed", "done", "running", "done"), queued=None, in_use=1, slots=1)
    head, _, *rows = shown(view, height=9)
    assert head == "3 done, 1 running, 1 failed, 1 of 1 slots in use, 2 not shown"
    assert [row.split()[:2] for row in rows] == [["1", "failed"], ["3", "running"], ["4", "done"]]


def test_rows_that_a_resumed_job_writes_again_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "val/loss": 0.5}\n{"step": 2, "val/loss": 0.4}\n')
    rows = MetricRows(file)
    assert [row["val/loss"] for row in rows.new()] == [0.5, 0.4]
    file.write_text('{"step": 1, "val/loss": 0.6}\n')
    assert [row["val/loss"] for row in rows.new()] == [0.6]
