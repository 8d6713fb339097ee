"""A training whose result shows the proof of another training or placement is caught here alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainkit import api
from trainkit.cli import main
from trainkit.config.compose import compose
from trainkit.config.schema import RunConfig
from trainkit.run.folder.proof_records import keep_proof, key_of, last_proof, proofs_folder
from trainkit.run.planning.plan import RunPlan, make_plan

FOUND = {
    "command": "trainkit prove strategy=mirrored", "same_training": "yes", "same_numbers": "rounding", "micro_size": 32,
    "steps": 10, "precision": "fp64", "largest_error": 1e-16,
}  # fmt: skip
KEPT = {"version": 1, "date": "2026-11-22T00:00:00+00:00", **FOUND, "devices": "cpu", "torch": "2.13.0"}


def plan_of(*arguments: str) -> RunPlan:
    return make_plan(RunConfig.from_dict(compose(["recipe=digits", *arguments]).values))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trainkit/proofs"


@pytest.mark.slow
def test_a_proof_stands_in_the_result_of_such_a_training(cwd: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threads = ["recipe=digits", "strategy=central_storage"]
    assert main(["prove", *threads, "--steps", "2"]) == 0
    proved = api.train(api.compose([*threads, "stop_at_step=1", "hydra.run.dir=run"]))["proved"]
    assert json.loads(Path("run/result.json").read_text())["proved"] == proved
    assert proved["command"] == "trainkit prove recipe=digits strategy=central_storage --steps 2"
    assert (proved["same_training"], proved["micro_size"], proved["steps"]) == ("yes", 32, 2)
    assert api.train(api.compose([*threads, "stop_at_step=1", "seed=1"]))["proved"] is None


def test_the_last_proof_of_a_key_is_kept(cache: Path) -> None:
    plan = plan_of("strategy=mirrored")
    assert last_proof(plan) is None
    assert keep_proof(plan, FOUND) is None
    assert keep_proof(plan, {**FOUND, "same_training": None}) is None
    assert [path.name for path in cache.iterdir()] == [f"{key_of(plan)}.json"]
    assert (last_proof(plan) or {})["same_training"] is None


def test_another_training_or_placement_has_another_key_and_what_is_shown_has_none() -> None:
    mirrored = ("strategy=mirrored", "strategy.replicas=2")
    for other in ("strategy.replicas=3", "strategy.reduce=ring", "batch.micro_size=16", "optimizer.lr=0.5"):
        assert key_of(plan_of(*mirrored, other)) != key_of(plan_of(*mirrored)), other
    shown = ("name=other", "loader.num_workers=2", "callbacks=[]", "log_every_steps=3", "stop_at_step=5")
    assert key_of(plan_of(*mirrored, *shown)) == key_of(plan_of(*mirrored))


@pytest.mark.parametrize(
    ("content", "is_proof"),
    [
        (json.dumps(KEPT), True),
        ("[" * 10_000, False),
        (json.dumps([KEPT]), False),
        (json.dumps({**KEPT, "version": 2}), False),
        (json.dumps({**KEPT, "steps": True}), False),
        (json.dumps({**KEPT, "same_numbers": "certainly"}), False),
        (json.dumps({**KEPT, "command": "x" * 5000}), False),
        (json.dumps(KEPT) + " " * 20_000, False),
    ],
)
def test_only_a_file_with_the_expected_keys_is_read_as_a_proof(cache: Path, content: str, is_proof: bool) -> None:
    plan = plan_of()
    cache.mkdir(parents=True)
    (cache / f"{key_of(plan)}.json").write_text(content)
    assert last_proof(plan) == (KEPT if is_proof else None)


def test_what_is_no_regular_file_is_ignored_without_waiting(cache: Path, tmp_path: Path) -> None:
    plan = plan_of()
    path = cache / f"{key_of(plan)}.json"
    cache.mkdir(parents=True)
    os.mkfifo(path)
    assert last_proof(plan) is None
    path.unlink()
    (tmp_path / "elsewhere.json").write_text(json.dumps(KEPT))
    path.symlink_to(tmp_path / "elsewhere.json")
    assert last_proof(plan) is None


def test_a_proof_that_cannot_be_kept_says_why(tmp_path: Path) -> None:
    (tmp_path / "trainkit").write_text("in the way")
    assert keep_proof(plan_of(), FOUND) == f"Not a directory: {tmp_path}/trainkit/proofs"


def test_a_relative_cache_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert proofs_folder() == tmp_path / ".cache/trainkit/proofs"
