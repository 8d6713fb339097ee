"""A resume that deletes a file of the user, or leaves what a killed save began, is caught here alone."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.trainer.ownership import MARK, OwnershipToken

COMMAND = [sys.executable, "-m", "trainkit"]
TRAINING = ["recipe=digits", "stop_at_step=40", "checkpoint.every_steps=5", "checkpoint.background=false"]


@pytest.mark.long
def test_kills_in_the_middle_of_saves_leave_nothing_and_take_nothing_of_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    held = [
        "live/rank_0",
        "logs/rank_1.log",
        "checkpoints/.tmp_x/notes",
        "checkpoints/step_00000099/notes",
        "thesis.tex",
    ]
    for name in held:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    OwnershipToken().make(run / "checkpoints/.tmp_step_00000010")
    before = (run / "checkpoints/.tmp_step_00000010" / MARK).read_bytes()
    for step in (10, 20, 30):
        fail = {"TRAINKIT_FAIL": f"step={step},phase=save,action=kill"}
        assert start(run, tmp_path, environ=fail) == -signal.SIGKILL
        owner = OwnershipToken.found(run)  # the kill comes as the save begins: what a later one leaves is planted
        assert owner is not None
        owner.make(run / f"checkpoints/.tmp_step_000000{step}-2")
        (run / f"checkpoints/.tmp_step_000000{step}-2/rank_00000.safetensors").write_text("half")
    assert start(run, tmp_path) == 0
    assert [(run / name).read_text() for name in held] == held
    assert (run / "checkpoints/.tmp_step_00000010" / MARK).read_bytes() == before
    assert sorted(path.name for path in (run / "checkpoints").glob(".tmp_*")) == [".tmp_step_00000010", ".tmp_x"]
    assert json.loads((run / "result.json").read_text())["steps"] == 40


def start(run: Path, cwd: Path, *, environ: dict[str, str] | None = None) -> int:
    command = [*COMMAND, "resume", str(run), *TRAINING[1:]]
    if not (run / "resolved.yaml").exists():
        command = [*COMMAND, *TRAINING, f"hydra.run.dir={run}"]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **(environ or {})}, check=False).returncode
