"""A JSON document with a key or type that `trainkit schema NAME` does not describe is caught here alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from trainkit.api import jobs
from trainkit.cli import main
from trainkit.report.schemas import DOCUMENTS
from trainkit.strategies.tensor_shards import TensorShard
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.results.job_results import SweepState
from trainkit.tracking.sending import TrackingState, begun_state
from trainkit.trained.predict import Parts
from trainkit.trainer.checkpoint.saving import Draft, begin, commit, write_part
from trainkit.trainer.manifest import EvaluatedIndex
from trainkit.trainer.ownership import OwnershipToken
from trainkit.verbs.looking.schema import schema_of


@pytest.fixture
def runs(run: Path, tmp_path: Path) -> Path:
    """Two runs that differ in their seed."""
    for seed in (3, 4):
        resolved = shutil.copytree(run, tmp_path / "runs" / str(seed)) / "resolved.yaml"
        resolved.write_text(resolved.read_text().replace("seed: 3", f"seed: {seed}"))
    return tmp_path / "runs"


def refuse_invalid(name: str, document: Any) -> None:
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)


def printed(capsys: pytest.CaptureFixture[str], name: str, *arguments: str, code: int = 0) -> Any:
    """What a verb prints with --json, valid against its schema."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    refuse_invalid(name, document)
    return document


def test_every_schema_documents_every_key() -> None:
    for name in DOCUMENTS:
        schema = schema_of(name)
        for part in (schema, *schema.get("$defs", {}).values()):
            assert [(name, key) for key, schema in part["properties"].items() if not schema.get("description")] == []


def test_a_document_without_a_key_is_refused_and_a_result_needs_status_and_reason_only() -> None:
    with pytest.raises(jsonschema.ValidationError, match="'version' is a required property"):
        refuse_invalid("diff", {"differences": [], "can_change_result": 0})
    refuse_invalid("result", {"status": "failed", "reason": "no space"})


def test_an_error_is_a_document_that_names_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, "error", "plan", "seed=-1", "optimizer.lrr=3", code=2)
    first, second = document["problems"]
    assert (first["key"], first["value"], second["key"], second["value"]) == ("seed", "-1", "optimizer.lrr", None)
    assert (document["exit_code"], document["sections"][1]) == (2, "optimizer-and-learning-rate")


@pytest.mark.parametrize("key", ["batch", "seed", "optimizer.groups", "callbacks"])
def test_explain(capsys: pytest.CaptureFixture[str], key: str) -> None:
    printed(capsys, "explain", "explain", key)


def test_ls(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    for arguments in ((), ("strategy",), ("strategy", "fsdp")):
        document = printed(capsys, "ls", "ls", *arguments)
        assert "strategy" in {choice["group"] for choice in document["choices"] if choice["name"] == "fsdp"}
        assert (document["text"] is not None) == (len(arguments) == 2)
    document = printed(capsys, "ls", "ls", str(runs))
    states = sorted((run["folder"], run["state"], run["step"]) for run in document["runs"])
    assert states == [(str(runs / seed), "finished", 24) for seed in "34"]


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        (("recipe=digits", "hardware=l4", "strategy=mirrored", "strategy.replicas=2"), True),
        (("model.hidden=[60000,60000]", "hardware=laptop"), False),
    ],
)
@pytest.mark.slow
def test_plan(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], fits: bool) -> None:
    document = printed(capsys, "plan", "plan", *arguments)
    assert (document["fits"], bool(document["remedies"])) == (fits, not fits)


def test_top_and_diff_with_its_exit_code(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    document = printed(capsys, "top", "top", str(runs), "--k", "1")
    assert (document["metric"], document["mode"], document["total"], len(document["runs"])) == ("val/loss", "min", 2, 1)
    assert main(["top", str(runs), "--then", "--json"]) == 2
    assert "Leave out --then." in capsys.readouterr().err
    document = printed(capsys, "diff", "diff", str(runs / "3"), str(runs / "4"), code=1)
    assert document["differences"] == [{"key": "seed", "left": 3, "right": 4, "tag": "maths"}]
    same = printed(capsys, "diff", "diff", str(runs / "3"), str(runs / "3"))
    assert same == {"version": 1, "differences": [], "can_change_result": 0}


def test_files_of_a_run_and_of_its_checkpoint(run: Path) -> None:
    step = "checkpoints/step_00000024"
    for name, file in (
        ("result", "result.json"),
        ("status", "status.json"),
        ("environment", "environment.json"),
        ("run_plan", "plan.json"),
        ("checkpoint_manifest", f"{step}/manifest.json"),
        ("checkpoint_index", f"{step}/index.json"),
        ("checkpoint_meta", f"{step}/meta.json"),
        ("checkpoints", "checkpoints/index.json"),
    ):
        refuse_invalid(name, json.loads((run / file).read_text()))


def test_the_index_of_a_sharded_checkpoint_lists_the_pieces_of_each_rank(tmp_path: Path) -> None:
    owner = OwnershipToken()
    draft = Draft(folder=begin(tmp_path, 1, owner), step=1, aliases={"param/tied": "param/w"})
    halves = [TensorShard(tensor=torch.zeros(2, 3), offset=(2 * rank, 0), shape=(4, 3)) for rank in range(2)]
    parts = [write_part(draft.folder, {"param/w": (half,)}, rank=rank) for rank, half in enumerate(halves)]
    commit(draft, parts, owner)
    index = json.loads((tmp_path / "step_00000001/index.json").read_text())
    refuse_invalid("checkpoint_index", index)
    assert [piece["file"][:10] for piece in index["tensors"]["param/w"]["pieces"]] == ["rank_00000", "rank_00001"]


def test_the_files_of_an_evaluator_a_tracker_and_a_sweep(tmp_path: Path) -> None:
    EvaluatedIndex(evaluating="step_00000002", metrics={"step_00000001": 0.5}).write(tmp_path)
    begun_state(tmp_path, TrackingState(tracker="wandb", project="digits", sent={"train/loss": 20}))
    state = SweepState.read(tmp_path, command=["-m", "seed=1,2"])
    state.add(SweepJob(name="0", folder=tmp_path / "0", overrides=("seed=1",), command=()))
    state.write()
    for name, file in (("evaluated", "evaluated.json"), ("tracking", "tracking/wandb.json"), ("sweep", "sweep.json")):
        refuse_invalid(name, json.loads((tmp_path / file).read_text()))
    assert [job.job for job in SweepState.read(tmp_path).rows.values()] == ["0"]


def test_an_evaluation_and_a_prediction_that_is_not_complete(
    cwd: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    printed(capsys, "evaluation", "evaluate", str(runs / "3"))
    monkeypatch.setattr(jobs, "run_job", stop)
    monkeypatch.setattr(Parts, "done", lambda _: [0])
    assert main(["predict", str(runs / "3"), "--out", "out.npy", "predict.batch_size=2"]) == 130
    refuse_invalid("prediction", json.loads(Path("out.npy.parts/prediction.json").read_text()))
