"""Runs in which a rank stops making progress, each in another way: who is named, with what, and how it ends."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.hanging import HANG
from tests.support import quick
from tests.support.verdicts import plain

ROOT = str(Path(__file__).parents[2])
FIXED = ["recipe=null", "--allow-package=tests", "model._target_=tests.end_to_end.hanging.Stuck", "model.in_features=5",
         "model.out_features=2", "batch.global_size=8", "batch.micro_size=2", "steps=400", "logger=[]", "callbacks=[]",
         "eval.every_epochs=null", "supervisor.hang_timeout_s=4", "hydra.run.dir=run"]  # fmt: skip


@pytest.fixture
def conf(cwd: Path) -> Path:
    path = cwd / "conf/data/stuck.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("_target_: tests.end_to_end.hanging.Samples\n")
    return cwd / "conf"


def hang(conf: Path, kind: str, ranks: int, *more: str) -> subprocess.CompletedProcess[str]:
    count = "60" if kind == "loader" else "9"
    data = ["data=stuck", "loader.num_workers=1"] if kind == "loader" else ["data=stuck"]
    many = ["strategy=mirrored", f"strategy.replicas={ranks}", "supervisor.max_restarts=0"] if ranks > 1 else []
    command = quick.command("--config-dir", str(conf), *FIXED, *data, *many, *more)
    environ = {**os.environ, "PYTHONPATH": ROOT, HANG: f"{ranks - 1}:{count}:{kind}"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.long  # the plain form, on a fake clock, is tests/run/test_watching.py
@pytest.mark.parametrize(
    ("kind", "ranks", "where"),
    [
        ("sleep", 2, "waits_for_ever"),
        ("loop", 2, "loops_for_ever"),
        ("gil", 2, "keeps_the_interpreter"),
        ("loader", 2, "waits_for_ever"),
        pytest.param("loop", 4, "loops_for_ever", marks=pytest.mark.matrix),
    ],
)
def test_the_rank_that_hangs_is_named_with_what_it_did(conf: Path, kind: str, ranks: int, where: str) -> None:
    ended = hang(conf, kind, ranks)
    assert ended.returncode == 5
    said = plain(ended.stderr)
    assert re.search(rf"rank {ranks - 1} has made no progress for \d+ s in step ", said)
    assert "The limit is supervisor.hang_timeout_s=4: raise it if the rank was healthy." in said
    assert ("(data)" if kind == "loader" else "(forward)") in said
    assert where in said
    assert plain(json.loads(Path("run/result.json").read_text())["reason"]).splitlines()[0] in said


@pytest.mark.long
def test_a_hang_in_the_first_step_is_found_by_the_limit_of_first_steps(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINKIT_FAIL", "rank=1,step=0,phase=forward,action=hang")
    ended = hang(conf, "none", 2, "supervisor.first_step_timeout_s=10")
    assert ended.returncode == 5
    assert (
        "rank 1 has made no progress for 10 s in step 0 (forward). The limit is supervisor.first_step_timeout_s=10:"
        in plain(ended.stderr)
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("sleep", marks=pytest.mark.matrix), "loop", "loader"])
def test_one_process_ends_by_itself_and_names_the_place(conf: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKIT_RANK", "0")
    ended = hang(conf, kind, 1)
    assert ended.returncode == 5
    assert re.search(r"rank 0 has made no progress for \d+ s in step ", ended.stderr)
    assert "The limit is supervisor.hang_timeout_s=4: raise it if the rank was healthy." in ended.stderr
    assert json.loads(Path("run/result.json").read_text())["status"] == "failed"
