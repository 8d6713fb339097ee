"""A checkpoint that is evaluated twice or never, or removed while it is evaluated, is caught here alone."""

import json
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.support.present import present
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.schema import load_resolved
from trainkit.data.sets.digits import Digits
from trainkit.errors import ConfigError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.session import evaluator_main as evaluator
from trainkit.run.session.async_evaluator import CheckpointEvaluator, evaluate_checkpoints
from trainkit.trainer.checkpoint.retention import EvaluatedIndex, Retention, owner_of
from trainkit.trainer.manifest import list_complete, manifest_bytes

OVERRIDES = [
    "recipe=null", "steps=12", "batch.global_size=64", "model.hidden=[8]", "eval.every_steps=4",
    "eval.metric=val/accuracy", "checkpoint.every_steps=4", "checkpoint.every_epochs=null",
    "checkpoint.keep_last=99", "callbacks=[]", "logger=[]", "quiet=true",
]  # fmt: skip
EVALUATOR = Identity(task=Task(role="evaluator", index=0, rank=1), num_ranks=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that evaluated at each checkpoint itself."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    trainkit.train(trainkit.compose(OVERRIDES), run_dir=folder)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    """A copy of it, whose checkpoints have not been judged."""
    shutil.copytree(trained, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    (folder.checkpoints / "index.json").unlink()
    return folder


def planned(folder: RunFolder, **checkpoint: Any) -> RunPlan:
    cfg = load_resolved(folder.resolved)
    return make_plan(replace(cfg, checkpoint=replace(cfg.checkpoint, **checkpoint)))


def evaluate(folder: RunFolder, requested: Callable[[], str | None] = lambda: None) -> None:
    evaluate_checkpoints(planned(folder), EVALUATOR, folder, requested=requested, on_phase=lambda phase, step: None)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_checkpoint_gets_the_figures_that_the_training_found(run: RunFolder) -> None:
    evaluate(run)
    own = {row["step"]: row["val/accuracy"] for row in rows(run.metrics) if "val/accuracy" in row}
    assert {row["step"]: row["val/accuracy"] for row in rows(run.evaluations)} == own
    assert sorted(own) == [4, 8, 12]


def test_what_was_done_in_an_earlier_life_is_not_done_again(run: RunFolder) -> None:
    first = CheckpointEvaluator(planned(run), run, device="cpu", on_phase=lambda phase, step: None)
    assert present(first.evaluate_next())["step"] == 4
    first.close()
    evaluate(run)
    evaluate(run)
    assert [row["step"] for row in rows(run.evaluations)] == [4, 8, 12]


def forget_metrics(folder: RunFolder) -> None:
    for checkpoint in list_complete(folder.checkpoints):
        (checkpoint.folder / "manifest.json").write_bytes(manifest_bytes(replace(checkpoint, metric=None)))


def test_it_names_the_best_where_the_training_knew_no_metric(run: RunFolder) -> None:
    forget_metrics(run)
    evaluate(run)
    best = max(rows(run.evaluations), key=lambda row: (row["val/accuracy"], -row["step"]))
    names = json.loads((run.checkpoints / "index.json").read_text())
    assert names == {"last": "step_00000012", "best": best["checkpoint"]}


def test_the_best_evaluated_checkpoint_and_the_one_that_is_being_evaluated_are_kept(run: RunFolder) -> None:
    forget_metrics(run)
    metrics = {"step_00000004": 0.9, "step_00000008": 0.5}
    EvaluatedIndex(metrics=metrics, evaluating="step_00000008").write(run.checkpoints)
    Retention(keep_last=1, keep_best=1, mode="max").apply(run.checkpoints, step=12, owner=owner_of(run.checkpoints))
    assert [one.step for one in list_complete(run.checkpoints)] == [12, 8, 4]
    EvaluatedIndex(metrics=metrics).write(run.checkpoints)
    Retention(keep_last=1, keep_best=1, mode="max").apply(run.checkpoints, step=12, owner=owner_of(run.checkpoints))
    assert [one.step for one in list_complete(run.checkpoints)] == [12, 4]


def test_a_damaged_checkpoint_is_named_and_left_out(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.checkpoints / "step_00000008" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    evaluate(run)
    assert [row["step"] for row in rows(run.evaluations)] == [4, 12]
    assert "step_00000008 is skipped: checkpoint" in capsys.readouterr().out


def test_it_waits_for_checkpoints_until_there_is_a_result(run: RunFolder) -> None:
    result = run.read_result()
    run.result.unlink()
    asked = iter(range(6))

    def requested() -> None:
        if next(asked, "over") == "over":
            run.write_result(present(result))

    evaluate(run, requested)
    assert len(rows(run.evaluations)) == 3


def test_any_run_folder_can_be_evaluated_by_hand(run: RunFolder, tmp_path: Path) -> None:
    assert evaluator.main([str(run.path), "/cpu:0"]) == 0
    epochs = [row["epoch"] for row in rows(run.evaluations)]
    assert epochs == pytest.approx([256 / 1437, 512 / 1437, 768 / 1437], abs=1e-5)
    (events,) = run.tensorboard.glob("events.out.tfevents.*")
    assert events.name.endswith(".evaluator")
    assert b"val/accuracy" in events.read_bytes()
    assert evaluator.main([str(tmp_path)]) == 2, "a folder without a run"


@pytest.mark.long
def test_the_evaluator_does_not_wait_for_a_run_without_a_process(run: RunFolder) -> None:
    run.result.unlink()
    (run.path / ".lock").write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))
    assert evaluator.main([str(run.path)]) == 0
    assert len(rows(run.evaluations)) == 3


BESIDE = ["recipe=null", "strategy=parameter_server", "strategy.evaluator=true"]


@pytest.mark.parametrize(
    ("splits", "keys", "told"),
    [
        (None, ["callbacks=[early_stop]"], "callbacks.early_stop: needs evaluations during the training"),
        ({"train": Digits(split="train")}, [], "strategy.evaluator: has no validation split to evaluate on"),
    ],
)
def test_an_evaluator_with_nothing_to_do_is_refused(
    splits: Mapping[str, Any] | None, keys: list[str], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(trainkit.compose([*BESIDE, *keys]).cfg, splits=splits)
    (problem,) = caught.value.problems
    assert str(problem).startswith(told)
