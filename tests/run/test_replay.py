"""`trainkit replay`: a run from its own record is the same bits, and what differs is named."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from tests.contract.running import QUIET, run
from trainkit.cli import main
from trainkit.verbs.looking.schema import schema_of
from trainkit.verbs.running.replay import Rows, first_difference

NET = ("model=net", "data=points", "batch.global_size=16", "batch.micro_size=8", "optimizer=sgd", "schedule=linear",
       "epochs=2", "log_every_steps=2")  # fmt: skip
OWN = ("--config-dir", str(Path(__file__).resolve().parents[1] / "support" / "conf"), "--allow-package", "tests")


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and document of a replay."""
    capsys.readouterr()
    code = main(["replay", *map(str, arguments), *OWN, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("replay")).validate(document)
    document["differing"] = [line for line in document["differing"] if "tracked files" not in line]  # of this checkout
    return code, document


def edited(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_rows_are_compared_by_their_steps_and_without_clocks() -> None:
    left: Rows = {(4, 2): {"train/loss": 1.0, "seconds": 1.0}, (6, 4): {"train/loss": 2.0}, (6, -1): {"val/loss": None}}
    assert first_difference(left, left) is None
    later: Rows = {(4, 2): {"train/loss": 1.0, "seconds": 9.0}, (6, 5): {"train/loss": 3.0}}
    assert first_difference(left, later) is None
    other: Rows = {(6, -1): {"val/loss": 0.5}, (6, 4): {"train/loss": 2.0}}
    assert first_difference(left, other) == {"step": 6, "name": "val/loss", "recorded": None, "replayed": 0.5}


@pytest.mark.slow
def test_a_replay_is_the_same_bits_and_a_changed_record_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(tmp_path / "run", *NET)
    code, report = replayed(capsys, tmp_path / "run", "--out", tmp_path / "a")
    assert (code, report["same"], report["first"], report["differing"]) == (0, True, None, [])
    assert (report["steps"], report["rows"] > 3) == (6, True)
    assert report["replayed_sha256"] == result["weights_sha256"]
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    changed = {**json.loads(rows[1]), "train/loss": 0.125}
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([rows[0], json.dumps(changed), *rows[2:], ""]))
    environment, threads = tmp_path / "run" / "environment.json", list[int]()
    devices = json.loads(environment.read_text())["devices"]
    edited(environment, python="2.7", devices={**devices, "threads": 3})
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    code, report = replayed(capsys, tmp_path / "run", "--out", tmp_path / "b")
    assert (code, report["first"]["step"], report["first"]["name"]) == (1, changed["step"], "train/loss")
    assert [line.partition(",")[0] for line in report["differing"]] == ["python was 2.7", "threads was 3"]
    assert threads[0] == 3, "a job of a sweep has a share of the cores"


@pytest.mark.slow
def test_a_run_that_a_time_ended_and_a_stopped_one_are_replayed_to_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = run(tmp_path / "timed", *NET[:-2], "stop_after=0.2s", "strategy=mirrored", "strategy.replicas=2")
    code, report = replayed(capsys, tmp_path / "timed", "--out", tmp_path / "a")
    assert (code, report["steps"], report["replayed_sha256"]) == (0, timed["steps"], timed["weights_sha256"])
    stopped = run(tmp_path / "stopped", *NET, "stop_at_step=3")
    code, report = replayed(capsys, tmp_path / "stopped", "--out", tmp_path / "b")
    assert (code, report["steps"], report["replayed_sha256"]) == (0, 3, stopped["weights_sha256"])


@pytest.mark.slow
def test_the_sources_in_a_run_are_those_that_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (
        "import torch\nclass Replayed(torch.nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    (tmp_path / "kept_model.py").write_text(source)
    line = ["kept_model.py", "data=digits", "objective=classification", *QUIET[1:], "steps=3", "hydra.run.dir=run"]
    assert main(line) == 0
    (tmp_path / "kept_model.py").write_text("class Replayed: ...\n")
    code, report = replayed(capsys, "run", "--out", "again")
    assert (code, report["same"]) == (0, True)
    assert report["differing"] == ["sources: kept_model.py has changed; the copy in the run is used"]


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    run(tmp_path / "run", *NET, "stop_at_step=3")
    for change, rule in (({"weights_sha256": None}, "no result with the hash"), ({"own_loss": True}, "its own loop")):
        before = (tmp_path / "run" / "result.json").read_text()
        edited(tmp_path / "run" / "result.json", **change)
        assert main(["replay", str(tmp_path / "run"), "--out", str(tmp_path / "new"), *OWN]) == 2
        assert rule in capsys.readouterr().err
        (tmp_path / "run" / "result.json").write_text(before)
    assert not (tmp_path / "new").exists()
