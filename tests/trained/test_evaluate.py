"""`trainkit evaluate`: figures that are not those of the run to the bit, or a file of the run that changes, are caught.

A killed evaluation that keeps its folder is caught here alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tests.support.results import result_of
from trainkit.api import jobs
from trainkit.data.sets.images import Digits
from trainkit.errors import CheckpointError, ConfigError
from trainkit.trainer.ownership import locked
from trainkit.verbs.support.call import Call
from trainkit.verbs.using import evaluate as verb

RUN = ("recipe=null", "steps=24", "callbacks=[]", "logger=[]", "quiet=true")
STRATEGIES = ("strategy=fsdp strategy.replicas=2", "strategy=pipeline strategy.stages=2", "strategy=parameter_server")
"""Sharded parameters, stages, and variables on servers: where no rank holds the whole model."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits."""
    folder = tmp_path_factory.mktemp("run") / "digits"
    trainkit.train(trainkit.compose([*RUN, "objective.top_k=[3]"]), run_dir=folder)
    return folder


def evaluate(path: Path, *overrides: str, **flags: str) -> int:
    call = Call(verb="evaluate", arguments=(str(path),), flags=flags, overrides=overrides, packages=("tests",))
    return verb.run(call)


def refused(path: Path, *overrides: str, **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        evaluate(path, *overrides, **flags)
    return str(caught.value)


def metrics(path: Path, capsys: pytest.CaptureFixture[str], *overrides: str, **flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate(path, *overrides, json="", **flags) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def own_metrics(run: Path) -> dict[str, float]:
    return dict(result_of(run)["metrics"])


def hashes(run: Path) -> dict[str, str]:
    files = (file for file in sorted(run.rglob("*")) if file.is_file())
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
def test_figures_are_those_of_the_run_to_the_bit_and_nothing_else_changes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hashes(run)
    content = metrics(run, capsys)
    expected = own_metrics(run)
    assert {name: content["metrics"][name] for name in expected} == expected
    written = Path(content["folder"])
    assert sorted(file.name for file in written.iterdir()) == ["evaluation.json", "report.md", "worst.png"]
    after = hashes(run)
    assert {name: after[name] for name in before} == before
    assert {Path(name).parent.parent.name for name in after.keys() - before.keys()} == {"evaluations"}


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_same_figures(run: Path, capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    evaluated, expected = metrics(run, capsys, *strategy.split())["metrics"], own_metrics(run)
    assert evaluated == pytest.approx({**evaluated, **expected}, rel=1e-6)


@pytest.mark.slow
def test_tables_agree_with_the_predictions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = metrics(run, capsys)
    images, labels = Digits(split="val").tensors()
    with torch.no_grad():
        scores = trainkit.load(run)(images)
    losses = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
    tables = content["tables"]
    worst = tables["val/worst"]["rows"]
    assert [row[0] for row in worst] == losses.topk(16).indices.tolist()
    assert [row[1] for row in worst] == pytest.approx(losses.topk(16).values.tolist())
    confusion = torch.zeros(10, 10)
    for label, guess in zip(labels, scores.argmax(1), strict=True):
        confusion[label, guess] += 1
    assert [row[1:] for row in tables["val/confusion"]["rows"]] == confusion.tolist()
    recall = [row[2] for row in tables["val/classes"]["rows"]]
    assert recall == pytest.approx((confusion.diagonal() / confusion.sum(1)).tolist())


@pytest.mark.slow
def test_calibration_is_the_distance_of_confidence_from_accuracy(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = metrics(run, capsys)["metrics"]["val/calibration_error"]
    images, labels = Digits(split="val").tensors()
    with torch.no_grad():
        chances = trainkit.load(run)(images).softmax(1).double()
    sure, right = chances.max(1).values, chances.argmax(1) == labels
    bins = torch.bucketize(sure, torch.linspace(0, 1, 16, dtype=torch.float64)[1:-1])
    groups = [(sure[bins == index], right[bins == index].double()) for index in {*bins.tolist()}]
    expected = sum(len(a) / len(sure) * abs(float(a.mean() - b.mean())) for a, b in groups)
    assert error == pytest.approx(expected)


def test_other_data_and_another_split_are_scored(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = metrics(run, capsys, split="train")
    assert content["num_samples"] == 1437
    assert "train/loss" in content["metrics"]
    scaled = metrics(run, capsys, "data=digits", "data.scaling=standard")["metrics"]["val/loss"]
    assert scaled != own_metrics(run)["val/loss"]


def test_two_evaluations_that_begin_at_the_same_moment_write_into_two_folders(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("evaluations"))
    first_choice, make = copy / "evaluations" / "val_last", Path.mkdir

    def mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if path == first_choice and not path.exists():
            make(path, parents=True)  # the other evaluation takes the name first
        make(path, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert Path(metrics(copy, capsys)["folder"]) == first_choice.with_name("val_last-2")


def test_what_a_killed_evaluation_leaves_is_deleted_by_a_later_one_and_the_folder_of_a_running_one_stays(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("evaluations")) / "evaluations"
    for name in (".new_1", ".new_2"):
        (root / name / "processes").mkdir(parents=True)
        os.utime(root / name, (1, 1))
    with locked(root / ".new_2/.lock"):
        os.utime(root / ".new_2", (1, 1))
        with monkeypatch.context() as patch:
            patch.setattr(jobs, "_content", lambda *_: pytest.fail("killed"))
            with pytest.raises(pytest.fail.Exception):
                evaluate(root.parent)
        assert [path.name for path in root.iterdir()] == [".new_2"]
    metrics(root.parent, capsys)
    assert [path.name for path in root.iterdir()] == ["val_last"]
    assert sorted(path.name for path in (root / "val_last").iterdir()) == ["evaluation.json", "report.md", "worst.png"]


def test_a_written_model_is_scored_like_its_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = metrics(run, capsys)["metrics"]
    before = hashes(run / "model")
    content = metrics(run / "model", capsys)
    assert content["metrics"] == expected
    assert Path(content["folder"]) == run / "evaluations" / "val_model"
    assert hashes(run / "model") == before
    assert metrics(run / "model" / "model.safetensors", capsys)["metrics"] == expected


def test_a_written_model_without_its_run_needs_data(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run / "model", tmp_path / "model", ignore=shutil.ignore_patterns(".*"))
    assert "data: the run of" in refused(folder)
    loss = metrics(folder, capsys, "data=digits", "objective=classification")["metrics"]["val/loss"]
    assert loss == pytest.approx(own_metrics(run)["val/loss"], rel=1e-6)


@pytest.mark.slow
def test_a_quantized_model_is_scored_on_one_device_and_refused_on_two(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchao")
    from trainkit.verbs.using import quantize

    quantize.run(Call(verb="quantize", arguments=(str(run),), flags={"to": "int8_weight"}))
    folder = run / "quantized" / "int8_weight"
    assert metrics(folder, capsys)["metrics"]["val/loss"] == pytest.approx(own_metrics(run)["val/loss"], rel=0.01)
    assert "runs on one device" in refused(folder, "strategy=mirrored", "strategy.replicas=2")


@pytest.mark.slow
def test_a_language_model_reports_bits_a_byte_and_its_worst_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 60)
    keys = (f"data.path={tmp_path}/text.txt", "data.context=16", "model.context=16", "model.vocab_size=16")
    small = ("model=gpt", "model.width=16", "model.num_heads=2", "model.num_layers=1")
    run = tmp_path / "run"
    trainkit.train(
        trainkit.compose([*RUN, "data=text_file", "objective=language_modelling", "schedule=constant", *keys, *small]),
        run_dir=run,
    )
    content = metrics(run, capsys)
    evaluated = content["metrics"]
    assert {name: evaluated[name] for name in own_metrics(run)} == own_metrics(run)
    assert evaluated["val/bits_per_byte"] == pytest.approx(evaluated["val/loss"] / 0.6931471805599453)
    assert "the cat sat" in (Path(content["folder"]) / "report.md").read_text().replace("\n", " ")


def test_a_damaged_checkpoint_ends_with_exit_code_4_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for file in copy.glob("checkpoints/*/*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = hashes(copy)
    with pytest.raises(CheckpointError) as caught:
        evaluate(copy)
    assert caught.value.exit_code == 4
    assert hashes(copy) == before


def test_samples_that_do_not_fit_the_model_and_a_file_that_is_none_are_refused(run: Path, tmp_path: Path) -> None:
    problem = refused(run, "data=synthetic", "data.shape=[7]")
    assert "the samples of val do not fit the model and objective" in problem
    assert "(2x7 and 64x128). A sample is (float32 (7,), int)." in problem
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "holds no model: it is neither a run" in refused(tmp_path / "weights.bin")
