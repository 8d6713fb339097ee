"""A replica that is lost and returns, and changes a bit or is counted wrong in the rows, is caught here alone."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import quick
from tests.support.present import present

OVERRIDES = [
    "recipe=digits",
    "epochs=40",
    "numerics.reproducible=true",
    "batch.global_size=64",
    "batch.micro_size=16",
    "model.dropout=0.1",
    "checkpoint.every_steps=50",
    "log_every_steps=50",
    "eval.every_epochs=null",
    "callbacks=[]",
    "logger=[]",
]


def command(*more: str) -> list[str]:
    return quick.command(*OVERRIDES, *more)


def result(folder: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((Path(folder) / "result.json").read_text())
    return found


def broken(index: int, marker: str) -> list[str]:
    """Killed in step 120 of the first attempt, and at every later start while the file exists."""
    starts = [f"index={index},phase=start,attempt={number},while={marker},action=kill" for number in range(1, 9)]
    return [f"index={index},step=120,phase=backward,attempt=0,action=kill", *starts]


def replicas_by_row(folder: str) -> list[int]:
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [row["replicas"] for row in rows if "replicas" in row]


@pytest.mark.long
def test_two_of_four_are_lost_and_return_and_no_bit_differs(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(command("hydra.run.dir=alone"), check=True, stdout=subprocess.DEVNULL)
    (cwd / "gone").touch()
    monkeypatch.setenv("TRAINKIT_FAIL", ";".join([*broken(2, "gone"), *broken(3, "gone")]))
    mirrored = ["strategy=mirrored", "strategy.replicas=4", "elastic.min_replicas=2", "elastic.retry_s=3"]
    said = []
    with subprocess.Popen(
        command(*mirrored, "hydra.run.dir=elastic"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in present(process.stderr):
            said.append(line)
            if "continues with 2 of 4 replicas" in line:
                (cwd / "gone").unlink()
        out = present(process.stdout).read()
    assert process.returncode == 0
    assert said[-1].endswith("again: 4 of 4 replicas.\n")
    assert "note: continues with 2 of 4 replicas: they share the shards of each step" in out
    assert out.count("finished after") == 1
    assert "resized" not in out
    counts = replicas_by_row("elastic")
    assert sorted(set(counts)) == [2, 4]
    assert (counts[0], counts[-1]) == (4, 4)
    assert result("elastic")["weights_sha256"] == result("alone")["weights_sha256"]
