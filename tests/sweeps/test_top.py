from __future__ import annotations

import pytest

from tests.sweeps.test_leaderboard import made
from trainkit.errors import ConfigError
from trainkit.verbs import top
from trainkit.verbs.call import Call


def called(*arguments, **flags):
    return top.run(Call(verb="top", arguments=tuple(map(str, arguments)), flags=flags))


def refused(*arguments, **flags):
    with pytest.raises(ConfigError) as caught:
        called(*arguments, **flags)
    (problem,) = caught.value.problems
    return f"{problem.key}: {problem.rule}"


def test_the_best_runs_are_printed(tmp_path, monkeypatch, capsys):
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


def test_another_metric_can_be_asked_for(tmp_path, capsys):
    made(tmp_path, "a", accuracy=0.5)
    made(tmp_path, "b", accuracy=0.25)
    called(tmp_path, metric="val/accuracy", mode="min")
    assert capsys.readouterr().out.splitlines()[2].startswith("1  b ")


def test_what_cannot_be_is_refused(tmp_path):
    assert refused("absent") == "absent: is no folder. Give that of a sweep, or one with runs in it."
    assert refused(tmp_path) == f"{tmp_path}: holds no run: no result.json below it."
    assert refused(tmp_path, k="0") == "--k 0: must be a whole number of at least 1."
    assert refused(tmp_path, mode="max") == "--mode: has no effect without --metric."
    assert refused(tmp_path, metric="val/f1", mode="best") == "--mode best: must be min or max."
    made(tmp_path, "a", accuracy=0.5)
    assert refused(tmp_path, metric="val/f1") == "--metric val/f1: no run has it. There are: val/accuracy."
