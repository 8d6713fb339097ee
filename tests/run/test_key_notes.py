"""A key of the user that has no effect and is silently ignored, or one of a recipe that is refused, is caught here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.cli import main
from trainkit.run.planning import notes as planning_notes

PACKAGE = """\
import torch

class Points:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((64,), index / 64), index % 10
"""
ADAMW_NOTE = "optimizer.groups.no_decay holds 2 of 4 parameters: layers.0.bias, layers.2.bias"


@pytest.fixture
def notes(cwd: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Plan a run from the command line; return its notes, or its problems."""

    def plan(*arguments: str, code: int = 0) -> list[str]:
        assert main(["plan", *arguments]) == code
        printed = capsys.readouterr()
        if code:
            return [line.strip() for line in printed.err.splitlines()[1:]]
        return [line.partition("note: ")[2] for line in printed.out.splitlines() if line.startswith("  note: ")]

    return plan


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The arguments of a dataset that has training samples alone."""
    (tmp_path / "test_key_notes_data.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/points.yaml").write_text("_target_: test_key_notes_data.Points\n")
    return ("data=points", "--config-dir", str(tmp_path / "conf"), "--allow-package", "test_key_notes_data")


@pytest.mark.slow
def test_a_run_ends_inside_the_warmup_of_its_recipe(cwd: Path) -> None:
    assert main(["steps=5", "callbacks=[]", "logger=[]"]) == 0
    (run,) = cwd.glob("outputs/digits/*")
    rates = [json.loads(line).get("lr") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rates[0] == pytest.approx(0.01 * 5 / 23), "step 5 of a warmup of 23 steps, as in the whole training"
    found = json.loads((run / "environment.json").read_text())["notes"]
    note = "warmup.epochs=1 is 23 steps: the run ends inside it, at step 5 the rate is 0.00217 of 0.01"
    assert note in found
    # its processes and a resumed run plan the same config again
    assert main(["resume", str(run), "strategy=mirrored", "strategy.replicas=1"]) == 0


def test_what_the_user_wrote_without_effect_is_refused_where_a_recipe_is_noted(notes: Callable[..., list[str]]) -> None:
    (problem,) = notes("recipe=null", "steps=20", "warmup.steps=30", code=2)
    assert problem.startswith("warmup.steps=30: 30 steps of warmup, and the training has 20")
    assert notes("recipe=null") == [ADAMW_NOTE], "the shipped pattern type:*Norm* suits other models"
    patterns = "optimizer.groups={wide:{match:['layers.0.*','blocks.*'],lr:0.1},again:{match:['*.0.bias']}}"
    first, second = notes("recipe=null", "optimizer=sgd", patterns, code=2)
    assert first.startswith("optimizer.groups.wide.match=blocks.*: matches no parameter that is trained")
    assert second.startswith("optimizer.groups.again: holds no parameter: earlier groups match the same")


def test_groups_of_the_user_name_parameters(notes: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_notes, "_SHOWN", 1)
    groups = "optimizer.groups={head:{match:['layers.2.*'],lr:0.1},none:{match:['*.bias']}}"
    assert notes("recipe=null", "optimizer=sgd", groups) == [
        "optimizer.groups.head holds 2 of 4 parameters: layers.2.weight and 1 more",
        "optimizer.groups.none holds 1 of 4 parameters: layers.0.bias",
    ]


def test_data_without_validation_is_noted_or_refused(notes: Callable[..., list[str]], points: tuple[str, ...]) -> None:
    none = "the data has no validation split: nothing is evaluated, and no checkpoint is the best"
    assert none in notes("recipe=null", *points)
    needs_it = ("eval.metric=val/accuracy", "callbacks=[early_stop]")
    metric, early_stop = notes("recipe=null", *points, *needs_it, code=2)
    assert metric.startswith("eval.metric=val/accuracy: there is no such metric: the data has no validation split")
    assert early_stop.startswith("callbacks.early_stop: needs evaluations, and the data has no validation split")
    # the metric of the digits recipe is not the user's
    assert "eval.metric=val/accuracy is left out" in notes(*points)


def test_a_loss_in_parts_is_refused_where_graphs_of_steps_use_all_scores(notes: Callable[..., list[str]]) -> None:
    small = ("recipe=null", "model=gpt", "model.num_layers=1", "model.num_heads=1", "model.width=8", "model.context=8",
             "model.vocab_size=16", "data=synthetic_tokens", "data.vocab_size=16", "data.context=8", "steps=2",
             "objective=language_modelling", "objective.padding=false", "compile.mode=step")  # fmt: skip
    said = notes(*small, "objective.cross_entropy=chunked", code=2)
    (found,) = [line for line in said if line.startswith("objective.cross_entropy")]
    assert found.startswith("objective.cross_entropy=chunked: has no effect with compile.mode=step, whose graphs")
    notes(*small, "objective.cross_entropy=plain")
