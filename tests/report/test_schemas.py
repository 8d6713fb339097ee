"""Every JSON document is valid against the schema that `trainkit schema NAME` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import trainkit
from tests.support.settings import latest
from trainkit.api import prediction
from trainkit.cli import main
from trainkit.report.schemas import DOCUMENTS
from trainkit.strategies.tensors.sharded import TensorShard
from trainkit.sweeps.job_sources import SweepJob
from trainkit.sweeps.results.job_results import SweepState
from trainkit.tracking.state import TrackingState, begun_state
from trainkit.trainer.checkpoint import EvaluatedIndex
from trainkit.trainer.checkpoint.saving import begin, commit, write_part
from trainkit.verbs.looking.schema import schema_of

SHORT = ("recipe=null", "steps=2", "epochs=null", "callbacks=[]", "logger=[]", "quiet=true")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their seed."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        trainkit.train([*SHORT, f"seed={seed}"], run_dir=folder / str(seed))
    return folder


def refuse_invalid(name: str, document: Any) -> None:
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main(arguments) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_schema_is_a_schema_and_documents_every_key(name: str) -> None:
    schema = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in (schema, *schema.get("$defs", {}).values()):
        assert [key for key, one in part["properties"].items() if not one.get("description")] == []


@pytest.mark.parametrize("key", ["batch", "model", "seed", "optimizer.groups", "average", "callbacks"])
def test_explain(capsys: pytest.CaptureFixture[str], key: str) -> None:
    refuse_invalid("explain", printed(capsys, "explain", key, "--json"))


@pytest.mark.parametrize("arguments", [(), ("strategy",), ("strategy", "fsdp")], ids=len)
def test_ls(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    found = printed(capsys, "ls", *arguments, "--json")
    refuse_invalid("ls", found)
    assert {"group": "strategy", "name": "fsdp"}.items() <= next(
        choice for choice in found["choices"] if choice["name"] == "fsdp"
    ).items()
    assert (found["text"] is not None) == (len(arguments) == 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("recipe=digits",),
        ("recipe=digits", "hardware=l4", "strategy=mirrored", "strategy.replicas=2"),
        ("model.hidden=[60000,60000]", "hardware=laptop"),
    ],
    ids=["bare", "hardware", "remedies"],
)
@pytest.mark.slow
def test_plan(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    found = printed(capsys, "plan", *arguments, "--json")
    refuse_invalid("plan", found)
    assert (found["fits"] is False) == bool(found["remedies"])


def test_ls_of_runs(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    found = printed(capsys, "ls", str(runs), "--json")
    refuse_invalid("ls", found)
    assert sorted((run["folder"], run["state"], run["step"]) for run in found["runs"]) == [
        (str(runs / "0"), "finished", 2),
        (str(runs / "1"), "finished", 2),
    ]


def test_top(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    found = printed(capsys, "top", str(runs), "--k", "1", "--json")
    refuse_invalid("top", found)
    assert (found["metric"], found["mode"], found["total"], len(found["runs"])) == ("val/loss", "min", 2, 1)


def test_diff_keeps_its_exit_code(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    found = printed(capsys, "diff", str(runs / "0"), str(runs / "1"), "--json", code=1)
    refuse_invalid("diff", found)
    assert found["differences"] == [{"key": "seed", "left": 0, "right": 1, "tag": "maths"}]
    same = printed(capsys, "diff", str(runs / "0"), str(runs / "0"), "--json")
    assert same == {"version": 1, "differences": [], "can_change_result": 0}


@pytest.mark.parametrize("name", ["result", "status", "environment"])
def test_files_of_a_run(runs: Path, name: str) -> None:
    refuse_invalid(name, json.loads((runs / "0" / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("checkpoint_manifest", "checkpoints/step_00000002/manifest.json"),
        ("checkpoint_index", "checkpoints/step_00000002/index.json"),
        ("checkpoint_meta", "checkpoints/step_00000002/meta.json"),
        ("checkpoints", "checkpoints/index.json"),
    ],
)
def test_files_of_a_checkpoint(runs: Path, name: str, file: str) -> None:
    refuse_invalid(name, json.loads((runs / "0" / file).read_text()))


def test_the_index_of_a_sharded_checkpoint_lists_the_pieces_of_each_rank(tmp_path: Path) -> None:
    draft = begin(tmp_path, 1)
    halves = [TensorShard(tensor=torch.zeros(2, 3), offset=(2 * rank, 0), shape=(4, 3)) for rank in range(2)]
    parts = [write_part(draft, {"param/w": (half,)}, rank=rank) for rank, half in enumerate(halves)]
    commit(draft, step=1, parts=parts, meta={"position": None}, aliases={"param/tied": "param/w"})
    found = json.loads((tmp_path / "step_00000001/index.json").read_text())
    refuse_invalid("checkpoint_index", found)
    assert [piece["file"][:10] for piece in found["tensors"]["param/w"]["pieces"]] == ["rank_00000", "rank_00001"]
    refuse_invalid("checkpoint_manifest", json.loads((tmp_path / "step_00000001/manifest.json").read_text()))


def test_the_metrics_of_an_evaluator(tmp_path: Path) -> None:
    EvaluatedIndex(evaluating="step_00000002", metrics={"step_00000001": 0.5}).write(tmp_path)
    refuse_invalid("evaluated", json.loads((tmp_path / "evaluated.json").read_text()))


def test_the_plan_of_a_run(tmp_path: Path) -> None:
    trainkit.train([*latest(*SHORT, "steps=20"), "hardware=l4"], run_dir=tmp_path)
    refuse_invalid("run_plan", json.loads((tmp_path / "plan.json").read_text()))


def test_the_jobs_of_a_sweep(tmp_path: Path) -> None:
    state = SweepState.read(tmp_path, command=["-m", "seed=1,2"])
    state.add(SweepJob(name="0", folder=tmp_path / "0", overrides=("seed=1",), command=()))
    state.write()
    found = json.loads((tmp_path / "sweep.json").read_text())
    refuse_invalid("sweep", found)
    assert found["version"] == 1
    assert [job.job for job in SweepState.read(tmp_path).rows.values()] == ["0"]


def test_a_prediction_that_is_not_complete(cwd: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(prediction, "_computed", stop)
    assert main(["predict", str(runs / "0"), "--out", "out.npy"]) == 130
    refuse_invalid("prediction", json.loads(Path("out.npy.parts/prediction.json").read_text()))


def test_evaluate(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    refuse_invalid("evaluation", printed(capsys, "evaluate", str(runs / "0"), "--json"))


def test_a_document_without_a_key_is_refused() -> None:
    with pytest.raises(jsonschema.ValidationError, match="'version' is a required property"):
        refuse_invalid("diff", {"differences": [], "can_change_result": 0})


def test_a_result_needs_no_more_than_status_and_reason() -> None:
    refuse_invalid("result", {"status": "failed", "reason": "no space"})


def test_top_refuses_json_beside_then(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    assert main(["top", str(runs), "--then", "--json"]) == 2
    assert "--json: prints only the leaderboard. Leave out --then." in capsys.readouterr().err


def test_the_state_of_a_tracker(tmp_path: Path) -> None:
    begun_state(tmp_path, TrackingState(tracker="wandb", project="digits", sent={"train/loss": 20}))
    refuse_invalid("tracking", json.loads((tmp_path / "tracking" / "wandb.json").read_text()))
