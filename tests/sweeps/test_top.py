from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.sweeps.test_leaderboard import made
from trainkit.config.resume import compose_anew
from trainkit.errors import ConfigError
from trainkit.verbs.looking import top
from trainkit.verbs.support.call import Call

RUN = (
    "recipe=null",
    "epochs=1",
    "cv.folds=3",
    "cv.fold=1",
    "stop_at_step=4",
    "callbacks=[]",
    "logger=[]",
    "quiet=true",
)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One fold of a training, ended early: what a search may leave."""
    root = tmp_path_factory.mktemp("sweep")
    trainkit.train(trainkit.compose(RUN), run_dir=root / "0")
    return root


def called(*arguments: object, overrides: tuple[str, ...] = (), **flags: str) -> int:
    return top.run(Call(verb="top", arguments=tuple(map(str, arguments)), flags=flags, overrides=overrides))


def refused(*arguments: object, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        called(*arguments, **given)
    (problem,) = caught.value.problems
    return f"{problem.key}: {problem.rule}"


def test_the_best_runs_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, accuracy in [("a", 0.5), ("b", 0.75), ("c", 0.25)]:
        made(tmp_path / "runs", name, accuracy=accuracy)
    assert called("runs", k="2") == 0
    assert capsys.readouterr().out == (
        "2 of 3 runs by val/accuracy (max)\n"
        "#  job  status    val/accuracy  overrides  time   folder\n"
        "1  b    finished  0.75                     6.1 s  runs/b\n"
        "2  a    finished  0.5                      6.1 s  runs/a\n"
    )


def test_another_metric_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path, "a", accuracy=0.5)
    made(tmp_path, "b", accuracy=0.25)
    called(tmp_path, metric="val/accuracy", mode="min")
    assert capsys.readouterr().out.splitlines()[2].startswith("1  b ")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    assert refused("absent") == "absent: is not a folder. Give the folder of a sweep, or one that contains runs."
    assert refused(tmp_path) == f"{tmp_path}: contains no run: it has no result.json below it."
    assert refused(tmp_path, k="0") == "--k 0: must be a whole number of at least 1."
    assert refused(tmp_path, mode="max") == "--mode: has no effect without --metric."
    assert refused(tmp_path, metric="val/f1", mode="best") == "--mode best: must be min or max."
    made(tmp_path, "a", accuracy=0.5)
    assert refused(tmp_path, metric="val/f1") == "--metric val/f1: no run has this metric. There are: val/accuracy."


def test_equal_figures_and_a_choice_by_the_test_split_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        made(tmp_path, name, accuracy=0.5)
    called(tmp_path)
    line = "equal val/accuracy: the lower val/loss comes first, then the earlier job"
    assert capsys.readouterr().out.splitlines()[-1] == line
    (tmp_path / "a/result.json").write_text(json.dumps({"status": "finished", "metrics": {"test/accuracy": 0.5}}))
    called(tmp_path, metric="test/accuracy")
    line = "test/accuracy selected the runs here, so it does not measure their quality"
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_the_best_is_trained_anew_whole_and_on_all_samples(
    sweep: Path, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(sweep, k="1", then="", overrides=("optimizer.lr=0.003", "hydra.run.dir=again")) == 0
    result = json.loads((cwd / "again/result.json").read_text())
    assert (result["status"], result["steps"], result["samples"]) == ("finished", 23, 1437)
    assert f"the config of {sweep}/0 optimizer.lr=0.003" in capsys.readouterr().out
    assert json.loads((sweep / "0/result.json").read_text())["steps"] == 4


def test_what_was_auto_follows_what_is_changed(sweep: Path) -> None:
    anew = compose_anew(sweep / "0", ["strategy=mirrored", "strategy.replicas=2"])
    assert anew.cfg.batch.micro_size is None  # that of one device, 64, would leave the second nothing to do
    assert (anew.cfg.cv.folds, anew.cfg.stop_at_step, anew.run_dir_given) == (None, None, False)
    assert anew.cfg.strategy["replicas"] == 2
    assert anew.notes[-1].endswith("is left out: no fold is held out of this training")


def test_what_cannot_be_trained_anew_is_refused(sweep: Path, tmp_path: Path) -> None:
    assert refused(sweep, k="2", then="") == "--k 2: --then trains the best run. Use --k 1."
    assert refused(sweep, overrides=("seed=1",)) == "top: takes no key=value."
    made(tmp_path, "a", status="failed")
    rule = "no run has val/accuracy: there is no best run."
    assert refused(tmp_path, then="") == f"--then: {rule}"
