"""The three trackers themselves, end to end and offline: a run that is killed and resumed is one tracked run.

They run where the packages are installed: pip install "wandb>=0.31" "mlflow>=3.17" "trackio>=0.43"
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainkit.tracking.state import read_state

pytestmark = pytest.mark.long
CANARY = "canary-7f3a9b2c5d"
READERS = {
    "wandb": """
import struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as pb

def records(content):  # blocks of 32 KiB as in a LevelDB log, after 7 bytes; a killed writer tears the last
    place, part = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        data, place = content[place + 7 : place + 7 + size], place + 7 + size
        if kind == 0 or len(data) < size:
            return
        part = data if kind in (1, 2) else part + data
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(part)
            yield record

ids, steps = set(), []
for path in sorted(Path(sys.argv[1]).rglob("*.wandb")):
    for record in records(path.read_bytes()):
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        if record.WhichOneof("record_type") == "history":
            items = {one.key or one.nested_key[0]: one.value_json for one in record.history.item}
            steps += [int(items["_step"])] if "train/loss" in items else []
print([sorted(ids), steps])
""",
    "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient()
runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
points = client.get_metric_history(runs[0].info.run_id, "train/loss")
print([[one.data.tags["trainkit.id"] for one in runs], [one.step for one in points], [runs[0].info.status]])
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("digits")
logs = SQLiteStorage.get_logs("digits", runs[0])
print([runs, [one["step"] for one in logs if "train/loss" in one], [len(runs)]])
""",
}


def environment(folder: Path) -> dict[str, str]:
    own = {"TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "WANDB_API_KEY": CANARY * 3, "CANARY": CANARY}


def command(tracker: str, run: Path) -> list[str]:
    sizes = ["steps=10000000", "log_every_steps=500", "checkpoint.every_steps=1000", "callbacks=[]"]
    more = [f"logger.{tracker}.wait_s=120"] + (["logger.wandb.mode=offline"] if tracker == "wandb" else [])
    more += ["epochs=null", "eval.every_epochs=null", "eval.every_steps=2000"]
    return [sys.executable, "-m", "trainkit", f"hydra.run.dir={run}", f"logger=[{tracker}]", *sizes, *more]


def wait_for(run: Path, tracker: str) -> Iterator[None]:
    """Yield until the tracker was sent something."""
    limit = time.monotonic() + 240
    while time.monotonic() < limit:
        state = read_state(run, tracker) if (run / "tracking" / f"{tracker}.json").exists() else None
        if state is not None and state.last_step >= 500:
            return
        yield


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_killed_and_resumed_run_is_one_tracked_run(tmp_path: Path, tracker: str) -> None:
    pytest.importorskip(tracker, reason=f'needs the package: pip install "{tracker}"', exc_type=ImportError)
    run, environ = tmp_path / "run", environment(tmp_path)
    with subprocess.Popen(
        command(tracker, run), env=environ, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        for _ in wait_for(run, tracker):
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    stop = int((run / "metrics.jsonl").read_text().splitlines()[-1].split(":")[1].split(",")[0]) // 500 * 500 + 5000
    resumed = [sys.executable, "-m", "trainkit", "resume", str(run), f"stop_at_step={stop}"]
    done = subprocess.run(resumed, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert "not sent" not in done.stderr + done.stdout, done.stderr + done.stdout
    answer = subprocess.run(
        [sys.executable, "-c", READERS[tracker], str(run)], env=environ, capture_output=True, text=True, check=True
    )
    found: list[list[Any]] = json.loads(answer.stdout.strip().splitlines()[-1].replace("'", '"'))
    state = read_state(run, tracker)
    assert state is not None
    assert len(found[0]) == 1
    assert state.id[:8] in found[0][0]
    assert found[1] == list(range(500, stop + 1, 500))
